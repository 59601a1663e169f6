"""A worker's results through the kernel program: what is taken and what is not, and that nothing is lost or torn."""

import select
import threading

import numpy as np
import pytest

from inanet.wire.xagg import ROW_BYTES, Kind
from inanet.xdp.inbox import MAX_SEGMENTS, InboxCount
from tests.xdp.conftest import CHILDREN, DROP, OWN, PARENT, PASS, OpenInbox, bare, frame
from tests.xdp.results import GROUP, JOB, KEY, everything, packet, show
from tests.xdp.test_rawip import frame as raw_frame

pytestmark = pytest.mark.privileged("loads BPF programs")

SPOOFED = {
    "another host": frame(packet(1), CHILDREN[0]),
    "another port of the parent's": frame(packet(1), PARENT ^ 1),
    "another key": frame(packet(1, key=KEY ^ 2), PARENT),
    "another job": frame(packet(1, job=8), PARENT),
    "a contribution": frame(packet(1, kind=Kind.DATA), PARENT),
    "an exponent": frame(packet(1, kind=Kind.EXPONENT), PARENT),
    "a result of a host's": frame(packet(1, host=1), PARENT),
    "another version": frame(b"\xa1" + packet(1)[1:], PARENT),
    "another address": frame(packet(1), PARENT, CHILDREN[0]),
    "another port": frame(packet(1), PARENT, OWN + 1),
    "a group that is not heard": frame(packet(1), PARENT, GROUP),
    "a short packet": frame(packet(1)[:-4], PARENT),
    "a long packet": frame(packet(1) + bytes(4), PARENT),
    "nothing": frame(b"", PARENT),
    "two packets, the second damaged": frame(packet(1) + packet(2)[:20] + bytes(4) + packet(2)[24:], PARENT),
    "a header that promises more": frame(packet(1) * 2, PARENT)[:-ROW_BYTES],
    "the first part of a packet": (lambda whole: whole[:20] + b"\x20" + whole[21:])(frame(packet(1), PARENT)),
    "IP options": (lambda whole: whole[:14] + b"\x46" + whole[15:])(frame(packet(1), PARENT)),
    "IPv6": (lambda whole: whole[:12] + b"\x86\xdd" + whole[14:])(frame(packet(1), PARENT)),
    "TCP": (lambda whole: whole[:23] + b"\x06" + whole[24:])(frame(packet(1), PARENT)),
}


def test_nothing_but_the_jobs_own_results_is_taken(open_inbox: OpenInbox) -> None:
    inbox = open_inbox()
    for what, arrived in SPOOFED.items():
        assert show(inbox, arrived) == PASS, what
    assert everything(inbox) == []
    assert inbox.state["head"][0] == 0
    assert inbox.counts()[InboxCount.TAKEN] == 0
    assert show(inbox, frame(packet(1), PARENT)) == DROP
    assert everything(inbox) == [(packet(1), PARENT)]


def test_a_full_ring_leaves_the_rest_to_the_socket(open_inbox: OpenInbox) -> None:
    inbox = open_inbox(64)
    verdicts = [show(inbox, frame(packet(fragment), PARENT)) for fragment in range(70)]
    assert verdicts == [DROP] * 64 + [PASS] * 6
    assert inbox.counts()[[InboxCount.TAKEN, InboxCount.FULL, InboxCount.PASSED]].tolist() == [64, 6, 6]
    batch = inbox.take()
    assert batch is not None
    # rows of a batch that is being worked on are not written to
    assert show(inbox, frame(packet(99), PARENT)) == PASS
    assert [batch.packet(index) for index in range(64)] == [packet(fragment) for fragment in range(64)]
    assert inbox.take() is None
    assert show(inbox, frame(packet(99), PARENT)) == DROP
    assert everything(inbox) == [(packet(99), PARENT)]


def test_super_frames_go_round_the_ring(open_inbox: OpenInbox) -> None:
    inbox = open_inbox(256)
    rng = np.random.default_rng(1)
    sent = 0
    pending: list[bytes] = []
    for _ in range(60):
        size = int(rng.integers(1, MAX_SEGMENTS + 1))
        packets = [packet(sent + index) for index in range(size)]
        verdict = show(inbox, frame(b"".join(packets), PARENT))
        # no more is there than fits, and what fits is taken
        assert (verdict == DROP) == (len(pending) + size <= inbox.rows)
        if verdict == DROP:
            pending += packets
            sent += size
        else:
            assert everything(inbox) == [(data, PARENT) for data in pending]
            pending = []
    assert sent > 4 * inbox.rows
    assert everything(inbox) == [(data, PARENT) for data in pending]
    counts = inbox.counts()
    assert counts[InboxCount.TAKEN] == sent
    assert counts[InboxCount.FRAMES] == 60
    assert counts[InboxCount.FULL] > 0


def test_a_frame_of_which_a_part_is_something_else_goes_up_whole(open_inbox: OpenInbox) -> None:
    inbox = open_inbox()
    whole = packet(1) + packet(2) + packet(3)
    assert show(inbox, frame(whole, PARENT)) == DROP
    for mixed in (
        packet(1) + packet(2, job=8) + packet(3),
        packet(1) + packet(2, kind=Kind.EXPONENT),
        whole + bytes(36),
        whole[:-1],
    ):
        assert show(inbox, frame(mixed, PARENT)) == PASS
    assert len(everything(inbox)) == 3
    counts = inbox.counts()
    assert counts[[InboxCount.FOREIGN, InboxCount.OTHER, InboxCount.PASSED]].tolist() == [2, 2, 4]


def test_jobs_share_a_frame_when_both_are_the_workers(open_inbox: OpenInbox) -> None:
    inbox = open_inbox()
    inbox.follow({(PARENT, JOB): KEY, (PARENT, 8): KEY ^ 8})
    assert show(inbox, frame(packet(1) + packet(2, job=8, key=KEY ^ 8) + packet(3), PARENT)) == DROP
    assert len(everything(inbox)) == 3


def test_more_senders_than_there_is_room_for_are_the_sockets(open_inbox: OpenInbox) -> None:
    inbox = open_inbox()
    many = {(CHILDREN[0] + (number << 16), 1): KEY for number in range(4096)}
    inbox.follow(many | {(PARENT, JOB): KEY, (PARENT, 8): KEY})
    inbox.hear(frozenset(range(0xE << 44, (0xE << 44) + 300)))
    assert show(inbox, frame(packet(1), PARENT)) == DROP
    assert show(inbox, frame(packet(1, job=8), PARENT)) == PASS
    # as soon as there is room, it is not
    inbox.follow({(PARENT, JOB): KEY, (PARENT, 8): KEY})
    assert show(inbox, frame(packet(1, job=8), PARENT)) == DROP


def test_the_raw_framing(open_inbox: OpenInbox) -> None:
    inbox = open_inbox(64, bare(OWN))
    assert show(inbox, raw_frame(packet(4), PARENT)) == DROP
    assert everything(inbox) == [(packet(4), bare(PARENT))]
    assert show(inbox, raw_frame(packet(4), CHILDREN[0])) == PASS
    assert show(inbox, frame(packet(4), PARENT)) == PASS
    assert show(inbox, raw_frame(packet(4), PARENT, protocol=6)) == PASS


def test_it_wakes_only_who_sleeps(open_inbox: OpenInbox) -> None:
    inbox = open_inbox()

    def readable() -> bool:
        return bool(select.select([inbox.fileno()], [], [], 0)[0])

    assert show(inbox, frame(packet(0), PARENT)) == DROP
    assert not readable()
    assert len(everything(inbox)) == 1
    inbox.sleep()
    assert not readable()
    for fragment in range(3):
        assert show(inbox, frame(packet(fragment), PARENT)) == DROP
        # once is enough
        assert inbox.state["asleep"][0] == 0
    assert select.select([inbox.fileno()], [], [], 5)[0]
    inbox.awake()
    assert len(everything(inbox)) == 3
    inbox.sleep()
    assert not readable()


def test_processors_at_once_lose_and_tear_nothing(open_inbox: OpenInbox) -> None:
    inbox = open_inbox(256)
    senders = 3
    each = 40
    frames = [
        [frame(b"".join(packet(1000 * who + 8 * k + j) for j in range(8)), PARENT) for k in range(each)]
        for who in range(senders)
    ]
    program = inbox.program("native")
    left: list[list[int]] = [[] for _ in range(senders)]

    def send(who: int) -> None:
        for number, arrived in enumerate(frames[who]):
            if program.test_run(arrived)[0] == PASS:
                left[who].append(number)

    threads = [threading.Thread(target=send, args=(who,)) for who in range(senders)]
    for thread in threads:
        thread.start()
    got: list[bytes] = []
    while True:
        ended = not any(thread.is_alive() for thread in threads)
        got += [data for data, _ in everything(inbox)]
        if ended:
            break
    for thread in threads:
        thread.join()
    passed = {(who, number) for who in range(senders) for number in left[who]}
    expected = [
        packet(1000 * who + 8 * k + j)
        for who in range(senders)
        for k in range(each)
        if (who, k) not in passed
        for j in range(8)
    ]
    assert sorted(got) == sorted(expected)
    # of each sender in its order
    for who in range(senders):
        mine = [int.from_bytes(data[8:12], "little") for data in got]
        mine = [number for number in mine if number // 1000 == who]
        assert mine == sorted(mine)
