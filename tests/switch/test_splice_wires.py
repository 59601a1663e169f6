"""A bump in the wire: RoCE hosts in namespaces, ina-switch between them as its file says, a capture that others decode."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from inanet.aio.switch import open_switch
from inanet.config.daemons import load
from inanet.config.switch import SwitchConfig
from inanet.phy.device import Device
from inanet.phy.pcap import PcapWriter
from inanet.phy.whole import RawWholeDevice
from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.ring import Member, Sizes
from inanet.proto.netreduce.worker import NetReduceWorker
from inanet.proto.roce import Attributes
from inanet.testing.netreduce import connect, connections_of
from inanet.wire.endpoint import address_of, endpoint
from inanet.wire.roce import Opcode
from tests.phy.helpers import drive, numbered
from tests.proto.roce.decoding import check_checksums, dissect
from tests.switch.running import running
from tests.switch.test_framed_switch import OWN, Rack, transfer

pytestmark = pytest.mark.privileged("CAP_NET_RAW, and CAP_SYS_ADMIN for namespaces")
SIZES = Sizes(length=10)
DEADLINE = 30.0


class Hosts:
    """A worker in each of a rack's namespaces, on a raw socket; what the first one sends and receives is captured."""

    def __init__(self, rack: Rack, stack: ExitStack, capture: Path) -> None:
        attributes = Attributes(path_mtu=SIZES.packet_bytes, timeout=15)
        self.workers = [
            NetReduceWorker(
                Member(1, 8, rank, 3, 3, SIZES, attributes=attributes), endpoint(address, 50000), psn=0xFFFFF0
            )
            for rank, address in enumerate(rack.addresses)
        ]
        self.devices: list[Device] = []
        for host, address in zip(rack.hosts, rack.addresses, strict=True):
            device: Device = host.run(lambda address=address: RawWholeDevice(address))
            if not self.devices:
                device = PcapWriter(device, capture, time.monotonic, whole=True)
            stack.callback(device.close)
            self.devices.append(device)
        connect(self.workers)

    def run(self, until: Callable[[], bool]) -> None:
        drive(
            list(zip(self.workers, self.devices, strict=True)),
            until,
            lambda: [worker.stats() for worker in self.workers],
            DEADLINE,
        )


def test_roce_hosts_with_a_switch_that_sums_in_between(stack: ExitStack, tmp_path: Path) -> None:
    rack = Rack(stack)
    for device in rack.devices.values():
        device.close()
    capture = tmp_path / "roce.pcap"
    hosts = Hosts(rack, stack, capture)
    ends = ", ".join(
        f'{{ source = "{address_of(c.source << 16)[0]}", destination = "{address_of(c.destination << 16)[0]}",'
        f" queue_pair = {c.queue_pair} }}"
        for c in connections_of(hosts.workers)
    )
    file = tmp_path / "s.toml"
    file.write_text(f"""
[switch]
transport = "packet"
address = "{OWN}"
ports = [{{ name = "p0" }}, {{ name = "p1", drop = 0.02 }}, {{ name = "p2" }}]
rings = [{{ ring = 8, length = {SIZES.length}, connections = [{ends}] }}]
""")
    config = load(file)
    assert isinstance(config, SwitchConfig)
    switch = rack.middle.run(lambda: open_switch(config))
    stack.callback(switch.close)
    spec = TensorSpec("t", "f32", (20_000,), "sum", ExponentMode.PROLOGUE)
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(20_000).astype(np.float32) for _ in range(3)]
    exact = np.sum([array.astype(np.float64) for array in arrays], axis=0)
    for worker, array in zip(hosts.workers, arrays, strict=True):
        worker.add_tensor(0, spec)
        worker.begin(0, 1, [array], time.monotonic())
    events: list[object] = []
    data = numbered(1, 1 << 20).tobytes()
    with running(switch), ThreadPoolExecutor(1) as pool:
        # somebody else's connection between the same hosts, at the same time
        arrived = pool.submit(transfer, rack.hosts[0], rack.hosts[2], rack.addresses[2], data)
        hosts.run(lambda: (events.extend(e for w in hosts.workers for e in w.events()) or len(events)) == 3)
        assert arrived.result() == data
    assert all(isinstance(event, RoundDone) for event in events), events
    assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()
    np.testing.assert_allclose(arrays[0], exact, atol=1e-6)
    assert {worker.mode for worker in hosts.workers} == {"switch"}
    assert switch.stats()["programs"]["netreduce"]["completed"] > 0  # type: ignore[index]
    hosts.devices[0].close()
    check_capture(capture, rack.addresses)


def check_capture(capture: Path, addresses: list[str]) -> None:
    """Both decoders accept what the host sent and what the switch made of the others' packets."""
    opcodes = check_checksums(capture)
    assert {Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE, Opcode.WRITE_LAST_IMMEDIATE} <= set(opcodes)
    rows = dissect(
        capture,
        "_ws.malformed",
        "_ws.expert.severity",
        "ip.src",
        "infiniband.bth.opcode",
        "infiniband.bth.psn",
    )
    assert all(row[0] == "" and row[1] == "" for row in rows)
    for address in (addresses[0], addresses[2]):
        numbers = [int(row[4]) for row in rows if row[2] == address and int(row[3]) < Opcode.ACKNOWLEDGE]
        steps = {(after - before + 2**23) % 2**24 - 2**23 for before, after in itertools.pairwise(numbers)}
        # one by one, or back
        assert max(steps) == 1
