"""The raw IPv4 framing: the same engine behind a header without ports, and everything else left alone."""

import struct
from collections.abc import Iterator

import numpy as np
import pytest

from inanet.proto.tree.slots import ShardColumn, SlotMemory, TreeColumn
from inanet.wire.endpoint import address_of
from inanet.wire.xagg import IP_PROTOCOL, Kind, decode
from inanet.xdp.memory import KernelCount, SharedMemory
from tests.xdp.conftest import (
    CHILDREN,
    DROP,
    OWN,
    OWN_MAC,
    PARENT,
    PASS,
    PEER_MAC,
    REDIRECT,
    TX,
    bare,
    internet_sum,
)
from tests.xdp.conftest import frame as datagram
from tests.xdp.test_golden import COMPARED, KEY, Side, golden, prepare, totals
from tests.xdp.test_leaving import LIVE, LO, PARENT_MAC, contribution

pytestmark = pytest.mark.privileged("loads BPF programs")

CAPACITY = 1600


def frame(
    payload: bytes,
    source: int,
    target: int = OWN,
    *,
    protocol: int = IP_PROTOCOL,
    options: bytes = b"",
    fragment: int = 0x4000,
    macs: tuple[bytes, bytes] = (PEER_MAC, OWN_MAC),
) -> bytes:
    """Ethernet and IPv4 around a payload; ``macs`` are the sender's and the receiver's."""
    head = 20 + len(options)
    addresses = b"".join(bytes(map(int, address_of(end)[0].split("."))) for end in (source, target))
    ip = struct.pack("!BBHHHBBH", 0x40 | head // 4, 0, head + len(payload), 0, fragment, 64, protocol, 0)
    ip += addresses + options
    ip = ip[:10] + struct.pack("!H", 0xFFFF & ~internet_sum(ip)) + ip[12:]
    return macs[1] + macs[0] + b"\x08\x00" + ip + payload


@pytest.fixture(params=["native", "generic"])
def loaded(request: pytest.FixtureRequest, root_needed: None) -> Iterator[tuple[SharedMemory, str]]:
    """Memory of a node at an address without a port, and the mode of its program."""
    memory = SharedMemory(CAPACITY, bare(OWN), request.param)
    yield memory, request.param
    memory.close()


def without_ports(side: Side) -> Side:
    """A node whose neighbours are addresses."""
    memory = side.memory
    memory.child_endpoint[0, : len(CHILDREN)] = [bare(child) for child in CHILDREN]
    memory.trees[0, TreeColumn.PARENT_ENDPOINT] = bare(PARENT)
    return side


def test_the_golden_set_leaves_the_same_memory(loaded: tuple[SharedMemory, str]) -> None:
    memory, mode = loaded
    mixed, alone = (
        without_ports(Side(memory, root=False)),
        without_ports(Side(SlotMemory(CAPACITY), root=False)),
    )
    for side in (mixed, alone):
        prepare(side)
    memory.tables["routes"][0, 0]["stands_for"][2] = 0b10000
    memory.tables["routes"][0]["credit_mask"] = (1 << 63) - 1
    handled = passed = 0
    for packet, source in golden(root=False):
        verdict, out, _ = memory.program(mode).test_run(frame(packet, source))  # type: ignore[arg-type]
        handled += verdict != PASS
        passed += verdict == PASS
        if verdict == PASS:
            mixed.ingest(packet, bare(source))
        elif verdict in (TX, REDIRECT):
            slot = int(memory.shards[mixed.row, ShardColumn.SLOT0]) + int.from_bytes(out[42:46], "little")
            assert out == frame(memory.rows[slot].tobytes(), OWN, source, macs=(OWN_MAC, PEER_MAC))
        alone.ingest(packet, bare(source))
        for name in COMPARED:
            assert np.array_equal(getattr(memory, name), getattr(alone.memory, name)), (name, packet[:24])
        for ours, reference in zip(totals(mixed, memory), totals(alone, None), strict=True):
            assert ours.tolist() == reference.tolist(), packet[:24]
    assert handled > 2 * passed
    assert memory.kernel_counts()[KernelCount.ANSWERED] > 0


def test_the_sum_leaves_for_the_parent(loaded: tuple[SharedMemory, str]) -> None:
    memory, mode = loaded
    side = without_ports(Side(memory, root=False))
    route = memory.tables["routes"][0][:1]
    route["credit_mask"], route["up_limit"], route["parent_ifindex"] = (1 << 63) - 1, 10, LO
    route["parent_mac"][0, :6] = np.frombuffer(PARENT_MAC, np.uint8)
    for child in LIVE:
        verdict, out, _ = memory.program(mode).test_run(  # type: ignore[arg-type]
            frame(contribution(child, 3, child + 1), CHILDREN[child])
        )
    assert verdict == (REDIRECT if mode == "native" else TX)
    row = memory.rows[int(memory.shards[side.row, ShardColumn.SLOT0]) + 3].tobytes()
    assert out == frame(row, OWN, PARENT, macs=(OWN_MAC, PARENT_MAC))
    packet = decode(row, KEY)
    assert (packet.kind, packet.gradient) == (Kind.DATA, 3)
    assert np.frombuffer(packet.payload, "<i4").tolist() == [8] * 256


@pytest.mark.parametrize("protocol", [1, 6, 17])
def test_other_protocols_are_left_alone(loaded: tuple[SharedMemory, str], protocol: int) -> None:
    memory, mode = loaded
    without_ports(Side(memory, root=False))
    packet = contribution(0, 3, 1)
    arrived = frame(packet, CHILDREN[0], protocol=protocol)
    assert memory.program(mode).test_run(arrived)[:2] == (PASS, arrived)  # type: ignore[arg-type]
    assert not memory.kernel_drops().any()
    assert memory.kernel_counts()[KernelCount.FRAMES] == 0


def test_what_a_socket_has_to_put_together_passes(loaded: tuple[SharedMemory, str]) -> None:
    memory, mode = loaded
    side = without_ports(Side(memory, root=False))
    packet = contribution(0, 3, 1)
    program = memory.program(mode)  # type: ignore[arg-type]
    for arrived in (
        frame(packet, CHILDREN[0], options=bytes(4)),
        frame(packet, CHILDREN[0], fragment=0x2000),
        frame(packet, CHILDREN[0], fragment=0x0010),
        frame(packet, CHILDREN[0], CHILDREN[1]),
        frame(packet, CHILDREN[0])[:-4],
        datagram(packet, CHILDREN[0]),
    ):
        assert program.test_run(arrived)[:2] == (PASS, arrived)
    assert memory.kernel_counts()[KernelCount.FRAMES] == 0
    assert program.test_run(frame(packet, CHILDREN[0]))[0] == DROP
    assert memory.bitmap[int(memory.shards[side.row, ShardColumn.SLOT0]) + 3] == 1
