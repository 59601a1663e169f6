"""Frames through a ring shared with the kernel."""

import select
import struct
from contextlib import ExitStack

import numpy as np
import pytest

from inanet.phy.port import FramePort
from inanet.phy.ring import BLOCK_BYTES, FrameRing, walk, without
from inanet.phy.vnet import HEADER_BYTES, FrameBatch
from tests.open_files import open_files
from tests.phy.helpers import DEADLINE
from tests.phy.spaces import cable, open_spaces

KIND = 0x0700
needs_root = pytest.mark.privileged("CAP_NET_RAW, and CAP_SYS_ADMIN for namespaces")


def frame(number: int, length: int = 309, kind: int = KIND) -> bytes:
    header = bytes(HEADER_BYTES) + b"\x02\0\0\0\0\x01\x02\0\0\0\0\x02" + kind.to_bytes(2, "big")
    return header + struct.pack(">I", number) + bytes(length - 18)


def batch(frames: list[bytes]) -> FrameBatch:
    lengths = np.array([len(one) for one in frames])
    return FrameBatch(np.frombuffer(b"".join(frames), np.uint8).copy(), np.cumsum(lengths) - lengths, lengths)


def read(ring: FrameRing, count: int) -> list[bytes]:
    """The next frames; fails when they do not come."""
    poll = select.poll()
    poll.register(ring.fileno(), select.POLLIN)
    got: list[bytes] = []
    while len(got) < count:
        frames = ring.receive()
        if frames is not None:
            got += [frames.frame(i) for i in range(len(frames))]
        else:
            assert poll.poll(DEADLINE * 1000), f"{len(got)} of {count} frames"
    return got


@needs_root
def test_frames_of_one_kind_come_in_order_block_after_block(stack: ExitStack) -> None:
    left, right = open_spaces(stack, 2)
    cable(left, "a0", right, "b0", None, None)
    sender = left.run(lambda: FramePort("a0"))
    ring = right.run(lambda: FrameRing("b0", KIND, blocks=4))
    beside = right.run(lambda: FramePort("b0"))
    for device in (sender, ring, beside):
        stack.callback(device.close)
    beside.filter(without(KIND))
    per_block = BLOCK_BYTES // 400
    sent = [frame(i, 60 + i % 250) for i in range(6 * per_block)]
    got: list[bytes] = []
    for first in range(0, len(sent), per_block):
        part = sent[first : first + per_block]
        assert sender.send(batch([*part, frame(first, kind=0x88B5)])) == len(part) + 1
        got += read(ring, len(part))
    assert got == sent
    assert ring.receive() is None
    assert ring.counters()["kernel_overflow"] == 0
    # the socket beside it has seen all others and none of these
    others = []
    while (frames := beside.receive()) is not None:
        others += [frames.frame(i) for i in range(len(frames))]
    assert frame(0, kind=0x88B5) in others
    assert not any(one[HEADER_BYTES + 12 :][:2] == b"\x07\x00" for one in others)


@needs_root
def test_tagged_frames_are_left_to_the_socket_beside(stack: ExitStack) -> None:
    left, right = open_spaces(stack, 2)
    cable(left, "a0", right, "b0", None, None)
    sender = left.run(lambda: FramePort("a0"))
    ring = right.run(lambda: FrameRing("b0", KIND))
    beside = right.run(lambda: FramePort("b0"))
    for device in (sender, ring, beside):
        stack.callback(device.close)
    beside.filter(without(KIND))
    plain = frame(1)
    tagged = plain[: HEADER_BYTES + 12] + b"\x81\x00\x00\x07" + plain[HEADER_BYTES + 12 :]
    assert sender.send(batch([tagged, plain])) == 2
    assert read(ring, 1) == [plain]
    poll = select.poll()
    poll.register(beside.fileno(), select.POLLIN)
    got: list[bytes] = []
    while tagged[HEADER_BYTES:] not in got:
        assert poll.poll(DEADLINE * 1000)
        frames = beside.receive()
        got += [] if frames is None else [frames.frame(i)[HEADER_BYTES:] for i in range(len(frames))]
    assert plain[HEADER_BYTES:] not in got


@needs_root
def test_a_ring_that_nobody_reads_overflows_and_says_so(stack: ExitStack) -> None:
    left, right = open_spaces(stack, 2)
    cable(left, "a0", right, "b0", None, None)
    sender = left.run(lambda: FramePort("a0"))
    ring = right.run(lambda: FrameRing("b0", KIND, blocks=1, block_bytes=4096 * 4))
    stack.callback(sender.close)
    stack.callback(ring.close)
    frames = batch([frame(i) for i in range(64)])
    for _ in range(8):
        assert sender.send(frames) == 64
    assert ring.counters()["kernel_overflow"] >= 400


@needs_root
def test_closing_and_refusals(stack: ExitStack) -> None:
    (space,) = open_spaces(stack, 1)
    with pytest.raises(OSError, match="interface nosuch0"):
        space.run(lambda: FrameRing("nosuch0", KIND))
    with pytest.raises(OSError, match="sharing a ring of 100 B with the kernel at lo: Invalid argument"):
        space.run(lambda: FrameRing("lo", KIND, blocks=1, block_bytes=100))
    ring = space.run(lambda: FrameRing("lo", KIND))
    ring.close()
    ring.close()
    assert ring.fileno() == -1
    assert ring.counters()["rx_frames"] == 0
    with pytest.raises(OSError, match="the ring is closed"):
        ring.receive()


@needs_root
def test_a_closed_ring_is_gone_although_its_object_is_not(stack: ExitStack) -> None:
    (space,) = open_spaces(stack, 1)
    before = open_files()
    ring = space.run(lambda: FrameRing("lo", KIND, blocks=2))
    assert len(open_files() - before) == 2
    ring.close()
    assert open_files() <= before
    assert ring.counters()["rx_frames"] == 0


def test_a_block_is_walked_by_what_it_says() -> None:
    arena = np.full(4096, 0xAA, np.uint8)
    words = arena.view(np.uint32)
    block = 1024
    words[block // 4 + 3], words[block // 4 + 4] = 4, 48
    for i, (captured, length, status) in enumerate([(20, 20, 1), (20, 30, 1), (20, 20, 0x11), (30, 30, 1)]):
        at = (block + 48 + i * 200) // 4
        words[at], words[at + 3], words[at + 4], words[at + 5], words[at + 6] = (
            200,
            captured,
            length,
            status,
            82,
        )
    offsets, lengths = np.zeros(10, np.int64), np.zeros(10, np.int64)
    assert walk(arena, words, block, 2048, offsets, lengths, 0) == 2
    assert offsets[:2].tolist() == [block + 48 + 72, block + 48 + 600 + 72]
    assert lengths[:2].tolist() == [30, 40]
    assert not arena[offsets[0] : offsets[0] + 10].any()
    assert arena[offsets[0] + 10] == 0xAA
    # a frame that would leave its block is none
    assert walk(arena, words, block, 700, offsets, lengths, 5) == 6
