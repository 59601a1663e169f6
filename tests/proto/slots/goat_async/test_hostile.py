"""Packets that nobody sound would send, with the right key: every field at random, at all three machines in a running job."""

import numpy as np

from inanet.proto.slots.goat.frames import seal
from inanet.sim.collaborative import KEY
from inanet.wire.batch import PacketBatch
from inanet.wire.goat import FRAME, FRAME_BYTES, MAGIC_VERSION
from tests.proto.slots.goat.lab import TESTBED, WORKERS
from tests.proto.slots.goat_async.training import Training

EXTREMES = np.array([0, 1, 2, 3, 31, 32, 63, 64, 255, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])


def forged(rng: np.random.Generator, count: int, key: int) -> np.ndarray:
    """Frames with a good tag and checksum, all else at random."""
    frames = np.zeros(count, FRAME)
    frames["magic"], frames["job"] = MAGIC_VERSION, 1
    frames["kind"] = rng.integers(0, 11, count)
    for name in ("asker", "node", "submodel", "fragment", "number", "bitmap"):
        top = np.iinfo(frames[name].dtype).max
        frames[name] = (
            np.where(rng.random(count) < 0.5, rng.choice(EXTREMES, count), rng.integers(0, 8, count)) & top
        )
    frames["values"] = rng.integers(-(2**31), 2**31, (count, 64))
    raw = frames.view(np.uint8).reshape(count, FRAME_BYTES)
    seal(raw, np.uint64(key))
    return raw


def test_whatever_comes_from_whomever_breaks_nothing() -> None:
    training = Training(
        16 * 64, lambda seen: 3, lambda worker: 0.01 + 0.001 * worker, lambda worker, step: np.ones(1024)
    )
    rng, network = np.random.default_rng(5), training.lab.network
    addresses = np.array(
        [training.lab._endpoints[name] for name in ("ps", *TESTBED.switches, *WORKERS)], np.uint64
    )
    seen = 0

    def attack() -> None:
        nonlocal seen
        for machine in (training.lab.server, *training.lab.workers.values()):
            raw = forged(rng, 40, KEY ^ int(rng.random() < 0.05))
            lengths = np.full(40, FRAME_BYTES, np.int64)
            lengths[rng.random(40) < 0.1] = int(rng.integers(0, FRAME_BYTES))
            batch = PacketBatch(
                raw.reshape(-1),
                np.arange(40, dtype=np.int64) * FRAME_BYTES,
                lengths,
                rng.choice(addresses, 40),
            )
            machine.receive(batch, network.now)
            seen += int(machine.drops.sum())

    for k in range(20):
        network.at(0.004 * k, attack)
    # a holder of the key can spoil sums, but nothing raises, nothing is written where it should not be
    training.run(3, deadline=20.0)
    assert seen > 0
