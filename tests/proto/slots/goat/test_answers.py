"""What the PS answers, and what that costs."""

import sys
from collections.abc import Callable

from inanet.proto.slots.goat.ps import goat_server
from inanet.proto.slots.ps import PSJob
from inanet.wire.endpoint import endpoint
from inanet.wire.goat import PS_NODE, Kind, Packet, decode
from tests.proto.tree.rig import batch_of

JOB, KEY, MANY = 3, 0x0123_4567_89AB_CDEF, 400
SWITCH = endpoint("10.0.0.1", 0xBEE0)
WORKERS = {endpoint(f"10.1.0.{index}", 4000): 1 << index for index in range(2)}


def data(worker: int, number: int) -> bytes:
    values = tuple(range(64))
    return Packet(Kind.DATA, JOB, PS_NODE, 0, number, number, 1 << worker, values).encode(KEY)


def calls(what: Callable[[], object]) -> int:
    """Calls of functions that are not Python's own, numpy's conversions among them."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(before)
    return count


def test_what_is_asked_for_again_is_looked_up_in_what_is_new_once() -> None:
    """A PS that lags finds thousands of both in a batch; a set of the new was made for each of the others."""
    server = goat_server()
    server.add_job(PSJob(JOB, WORKERS, (SWITCH,), 2 * MANY, 0, switches=(SWITCH,), key=KEY))
    server.receive(batch_of([(data(w, n), SWITCH) for n in range(MANY) for w in (0, 1)]), 0.0)
    (answers,) = server.transmit(0.0)
    assert len(answers) == MANY
    again = [(data(0, n), SWITCH) for n in range(MANY)]
    new = [(data(w, n), SWITCH) for n in range(MANY, 2 * MANY) for w in (0, 1)]
    server.receive(batch_of(again + new), 0.0)
    sent = []
    assert calls(lambda: sent.extend(server.transmit(0.0))) < MANY // 4
    (answers,) = sent
    found = [decode(answers.packet(i), KEY) for i in range(len(answers))]
    assert sorted((p.number, p.bitmap) for p in found) == [
        *((n, 1) for n in range(MANY)),
        *((n, 3) for n in range(MANY, 2 * MANY)),
    ]
