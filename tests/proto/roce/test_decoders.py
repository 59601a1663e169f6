"""What leaves and arrives, read by two decoders of other people: scapy (checksums) and Wireshark's (structure)."""

from pathlib import Path

import numpy as np
import pytest

from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.phy.pcap import PcapWriter
from inanet.proto.roce import Attributes, Status
from inanet.testing.clock import FakeClock
from inanet.wire.batch import PacketBatch
from inanet.wire.roce import CONGESTED, PSN_MASK, Opcode
from tests.proto.roce.decoding import check_checksums, dissect
from tests.proto.roce.rig import Wire

MTU = 256
#: first PSN of each host; both wrap on the way
PSNS = (PSN_MASK - 50, PSN_MASK - 3)
SENT_BY_A, SENT_BY_B = "10.0.0.1", "10.0.0.2"


class Marking(FaultInjector):
    """Loses packets, and marks every tenth as a congested switch does: the IPv4 checksum is adjusted."""

    def receive(self) -> PacketBatch | None:
        """Receive, impaired."""
        batch = super().receive()
        if batch is not None:
            for at in batch.offsets[::10].tolist():
                change = (batch.arena[at + 1] | CONGESTED) - batch.arena[at + 1]
                batch.arena[at + 1] += change
                old = ~(int(batch.arena[at + 10]) << 8 | int(batch.arena[at + 11])) & 0xFFFF
                new = old + int(change)
                new = ~((new & 0xFFFF) + (new >> 16)) & 0xFFFF
                batch.arena[at + 10], batch.arena[at + 11] = new >> 8, new & 0xFF
        return batch


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture at host a of two busy hosts: losses, marks, receives posted late, a refused request at the end."""
    path = tmp_path_factory.mktemp("roce") / "a.pcap"

    def wrap(device: Device, name: str, clock: FakeClock) -> Device:
        lossy = Marking(device, ord(name), clock, drop=0.03, duplicate=0.02)
        return PcapWriter(lossy, path, clock, whole=True) if name == "a" else lossy

    wire = Wire(Attributes(path_mtu=MTU, window=32, ack_every=8, timeout=10), psns=PSNS, wrap=wrap)
    for k, host in enumerate(wire.hosts):
        for i in range(16):
            data = np.full(211 * i, i + 1, np.uint8)
            host.pair.post_write(data, 7000 * i, i if i % 3 == k else None, wr_id=i)
    wire.run(until=lambda: all(host.pair.stats()["rnr_naks_received"] for host in wire.hosts))
    for host in wire.hosts:
        host.pair.post_receive(count=10)
    wire.run()
    for host in wire.hosts:
        assert host.statuses() == [(i, Status.SUCCESS) for i in range(16)]
        assert host.pair.stats()["retransmissions"] > 0
        assert host.pair.stats()["cnps_sent"] > 0
        for i in range(16):
            assert (host.memory[7000 * i :][: 211 * i] == i + 1).all()
    wire.a.pair.post_write(np.ones(8, np.uint8), 1 << 30)
    wire.run()
    assert Status.REM_ACCESS_ERR in [status for _, status in wire.a.statuses()]
    wire.a.device.close()
    return path


def test_scapy_finds_every_checksum_right(capture: Path) -> None:
    opcodes = check_checksums(capture)
    assert len(opcodes) > 200
    assert set(opcodes) == set(Opcode)


def test_wireshark_finds_nothing_malformed_and_every_sequence_legal(capture: Path) -> None:
    rows = dissect(
        capture,
        "_ws.malformed",
        "_ws.expert.severity",
        "ip.src",
        "infiniband.bth.opcode",
        "infiniband.bth.psn",
        "infiniband.bth.a",
        "infiniband.reth.dmalen",
        "infiniband.immdt",
        "infiniband.aeth.syndrome.opcode",
        "infiniband.aeth.syndrome.error_code",
        "infiniband.bth.destqp",
        "infiniband.invariant.crc",
        "ip.checksum.status",
    )
    assert len(rows) > 200
    assert all(row[0] == "" and row[1] == "" for row in rows)
    assert {row[12] for row in rows} == {"1"}
    # it knows no notifications: their checksum is left to scapy
    assert all(row[11].startswith("0x") for row in rows if int(row[3]) != Opcode.CNP)
    assert {row[10] for row in rows if row[2] == SENT_BY_A} == {"0x000012"}
    for source, first in zip((SENT_BY_A, SENT_BY_B), PSNS, strict=True):
        requests = [row for row in rows if row[2] == source and int(row[3]) <= Opcode.WRITE_ONLY_IMMEDIATE]
        answers = [row for row in rows if row[2] != source and int(row[3]) == Opcode.ACKNOWLEDGE]
        check_requests(requests, first, all_there=source == SENT_BY_A)
        # every packet is there, the refused one of host a included
        check_answers(answers, first, max(int(row[4]) - first & PSN_MASK for row in requests) + 1)
    naks = {(row[8], row[9]) for row in rows if row[8] == "3"}
    assert {("3", "0"), ("3", "2")} == naks
    assert any(row[8] == "1" for row in rows)


def check_requests(rows: list[list[str]], first: int, *, all_there: bool) -> None:
    """Numbers go up by one or back; the same number is the same packet; messages are whole."""
    packets: dict[int, tuple[str, ...]] = {}
    before = -1
    for row in rows:
        index = int(row[4]) - first & PSN_MASK
        if all_there:
            assert index <= before + 1
        shape = (row[3], row[6], row[7])
        assert packets.setdefault(index, shape) == shape
        before = index
    if not all_there:
        return
    assert sorted(packets) == list(range(len(packets)))
    left = 0
    for index in range(len(packets)):
        opcode, length, immediate = packets[index]
        code = Opcode(int(opcode))
        starts = code in (Opcode.WRITE_FIRST, Opcode.WRITE_ONLY, Opcode.WRITE_ONLY_IMMEDIATE)
        assert starts == (left == 0) == bool(length)
        if starts:
            left = max(-(-int(length) // MTU), 1)
        left -= 1
        assert (code in (Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE)) == (left > 0)
        assert bool(immediate) == code.name.endswith("IMMEDIATE")
    assert left == 0


def check_answers(rows: list[list[str]], first: int, packets: int) -> None:
    """Acknowledgements are of what was sent, and never take anything back."""
    highest = -1
    for row in rows:
        index = int(row[4]) - first & PSN_MASK
        assert index < packets
        acknowledged = index - (row[8] != "0")
        assert acknowledged >= highest
        highest = acknowledged
