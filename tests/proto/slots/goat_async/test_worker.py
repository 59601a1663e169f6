"""A worker of epochs alone, packet by packet: what a step that has failed leaves behind."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.common.plan import Scheduled
from inanet.proto.slots.goat.frames import seal
from inanet.proto.slots.goat_async.worker import epoch_worker
from inanet.proto.slots.window import TIMING
from inanet.proto.slots.worker import Membership, Worker
from inanet.wire.goat import FRAME, FRAME_BYTES, MAGIC_VERSION, NO_SUBMODEL, Kind
from tests.proto.slots.goat_async.training import spec
from tests.proto.tree.rig import batch_of

KEY, SWITCH = 0x1234_5678_9ABC_DEF1, 77


def result(epoch: int, value: float) -> list[tuple[bytes, int]]:
    """A model of one fragment, and what is behind it."""
    frames = np.zeros(2, FRAME)
    frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, Kind.RESULT, 1
    frames["submodel"], frames["number"], frames["bitmap"] = NO_SUBMODEL, epoch, 1
    frames["fragment"] = np.arange(2)
    frames["values"][0] = np.full(64, value, ">f4").view(">i4")
    raw = frames.view(np.uint8).reshape(2, FRAME_BYTES)
    seal(raw, np.uint64(KEY))
    return [(raw[k].tobytes(), SWITCH) for k in range(2)]


@pytest.fixture
def worker() -> Worker:
    made = epoch_worker(
        Membership(1, 0, 2, 2, SWITCH, SWITCH, root=0, key=KEY), 4, replace(TIMING, silent=60.0)
    )
    made.add_tensor(0, spec(64))
    made.schedule(0, (Scheduled(0, 0, 1, (0, 0), (-1,)),))
    return made


def test_what_a_step_that_was_given_up_would_have_been_moved_by_is_in_the_next_one(
    worker: Worker,
) -> None:
    first, second = (np.ones(64, np.float32) for _ in range(2))
    worker.begin(0, 1, [first], 0.0)
    worker.transmit(0.0)
    worker.give_up(1)
    worker.receive(batch_of(result(1, 2.0)), 0.1)
    assert (first == 1).all()
    worker.begin(0, 2, [second], 0.2)
    worker.transmit(0.2)
    worker.receive(batch_of(result(2, 5.0)), 0.3)
    assert (second == 5).all()


def test_a_step_that_waits_is_not_sent_once_it_has_failed(worker: Worker) -> None:
    first, second = (np.ones(64, np.float32) for _ in range(2))
    for number, array in ((1, first), (2, second)):
        worker.begin(0, number, [array], 0.0)
    worker.transmit(0.0)
    worker.give_up(2)
    worker.receive(batch_of(result(1, 2.0)), 0.1)
    assert (first == 2).all()
    assert worker.transmit(0.2) == []
    assert (second == 1).all()
