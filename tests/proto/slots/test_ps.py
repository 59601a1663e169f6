"""The PS of ATP, A2TP and ESA, packet by packet."""

import numpy as np
import pytest

from inanet.proto.slots.atp.ps import atp_server
from inanet.proto.slots.ps import PSJob
from inanet.wire import a2tp, atp
from inanet.wire.atp import ECHO, PROBE, PULL, Flag, Packet, decode
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from tests.proto.slots.judge import SUM, A, B, data
from tests.proto.tree.rig import batch_of

SWITCH = endpoint("10.0.0.254", 1)


class Server:
    """A PS of job 1 with two workers; feed it packets, see what it sends."""

    def __init__(self, frame: np.dtype = atp.FRAME, **kwargs) -> None:
        self.frame = frame
        self.ps = atp_server(frame, pull_after=0.005)
        self.ps.add_job(PSJob(1, {A: 1, B: 2}, [SWITCH], 8, 100, **{"switches": [SWITCH]} | kwargs))

    def feed(self, *packets: tuple[Packet | bytes, int], now: float = 0.0) -> list[Packet]:
        data = [(p if isinstance(p, bytes) else p.encode(self.frame), source) for p, source in packets]
        self.ps.receive(batch_of(data), now)
        return self.sent(now)

    def sent(self, now: float) -> list[Packet]:
        out = self.ps.transmit(now)
        assert all(transmission.destination == SWITCH for transmission in out)
        return [decode(t.packet(index), self.frame) for t in out for index in range(len(t))]


def test_the_answer_carries_the_sum_and_frees_the_slot_it_was_sent_to():
    server = Server()
    assert server.feed((data(0, 5, slot=3), A)) == []
    (answer,) = server.feed((data(1, 5, slot=3), B))
    assert (answer.values, answer.flags, answer.bitmap) == (SUM, Flag.ACK, 1)
    assert (answer.app, answer.seq, answer.agtr, answer.length) == (1, 5, 3, 0)
    # asked again: answered again, once for all who ask at once
    assert server.feed((data(0, 5, slot=3), A), (data(1, 5, slot=3), B)) == [answer]


def test_another_slot_is_chosen_once_for_a_fragment_that_has_collided():
    server = Server()
    server.feed((data(0, 5, slot=3, flags=Flag.COLLISION), A))
    (answer,) = server.feed((data(1, 5, slot=3), B))
    assert answer.flags == Flag.ACK | Flag.COLLISION
    assert 0 <= answer.length < 100
    for _ in range(3):
        again = server.feed((data(0, 5, slot=3, flags=Flag.COLLISION), A))
        assert again == [answer]


def test_marks_of_everything_that_came_are_in_the_answer():
    server = Server(a2tp.FRAME)
    server.feed((data(0, 5, flags=Flag.ECN), A))
    server.feed((data(0, 5, mark=a2tp.Mark.COL), A))
    (answer,) = server.feed((data(1, 5, mark=a2tp.Mark.BYPASS), B))
    assert answer.flags == Flag.ACK | Flag.ECN
    assert answer.mark == a2tp.Mark.COL
    (clean,) = server.feed((data(0, 6), A), (data(1, 6), B))
    assert (clean.flags, clean.mark) == (Flag.ACK, 0)


def test_probes_are_echoed_at_once():
    server = Server()
    assert server.feed((data(1, 77, flags=PROBE), B))[0].flags == ECHO
    (echo,) = server.feed((data(1, 78, flags=PROBE), B))
    assert (echo.bitmap, echo.seq, echo.app) == (2, 78, 1)
    assert server.ps.stats()["packets_added"] == 0


def test_what_stays_incomplete_is_pulled_with_back_off():
    server = Server()
    server.feed((data(0, 5, slot=3), A))
    times = []
    for _ in range(4):
        at = server.ps.timer()
        server.ps.on_timer(at)
        (pull,) = server.sent(at)
        assert (pull.flags, pull.seq, pull.agtr) == (PULL, 5, 3)
        times.append(at)
    assert np.diff([0.0, *times]).tolist() == pytest.approx([0.005, 0.01, 0.02, 0.04])
    server.feed((data(1, 5), SWITCH), now=times[-1])
    server.ps.on_timer(server.ps.timer())
    assert server.ps.timer() is None


def test_without_a_switch_there_is_nothing_to_pull():
    server = Server(switches=[])
    server.feed((data(0, 5), A))
    assert server.ps.timer() is None


@pytest.mark.parametrize(
    ("packet", "source", "reason"),
    [
        (data(0, 1).encode()[:-1], A, Drop.SHORT),
        (data(0, 1).encode() + b"\0", A, Drop.OVERSIZED),
        (data(0, 1, job=2), A, Drop.FOREIGN_JOB),
        (data(0, 1), endpoint("10.3.3.3", 1), Drop.FOREIGN_HOST),
        (data(2, 1), A, Drop.FOREIGN_HOST),
        (Packet(0, 2, 1, 1, 0, (0,) * 62), A, Drop.FOREIGN_HOST),
        (data(0, 1, flags=Flag.ACK), A, Drop.BAD_TYPE),
    ],
)
def test_every_drop_has_its_reason(packet, source, reason):
    server = Server()
    assert server.feed((packet, source)) == []
    assert server.ps.drops_by_reason()[reason.label] == 1
    assert sum(server.ps.drops_by_reason().values()) == 1
    assert server.ps.stats()["packets_added"] == 0


def test_job_0_is_refused_because_public_programs_take_it_for_free():
    with pytest.raises(ValueError, match="1 to 255"):
        atp_server().add_job(PSJob(0, {A: 1}, [SWITCH], 8, 8))
