"""The tracer shows what passes, in both directions and only what passes."""

import numpy as np

from inanet.testing.trace import Direction, Tracer
from inanet.wire.batch import PacketBatch, Transmission
from tests.phy.helpers import PEER, ScriptedDevice, batch_of, contents, numbered


def test_every_batch_is_shown_once() -> None:
    seen: list[tuple[Direction, list[bytes]]] = []

    def watch(direction: Direction, batch: PacketBatch | Transmission) -> None:
        seen.append((direction, contents(batch)))

    device = ScriptedDevice([batch_of([b"a", b"bc"])], accepts=[2, 0])
    device.held.append((1.0, batch_of([b"held"])))
    tracer = Tracer(device, watch)
    part = Transmission(PEER, numbered(5, 8), np.arange(5) * 8, 8)
    assert contents(tracer.receive()) == [b"a", b"bc"]
    assert tracer.receive() is None
    assert tracer.send(part, 1) == 2
    assert tracer.send(part, 3) == 0
    assert tracer.flush(0.5) is None
    assert contents(tracer.flush(1.0)) == [b"held"]
    assert seen == [
        (Direction.RECEIVED, [b"a", b"bc"]),
        (Direction.SENT, contents(part)[1:3]),
        (Direction.RECEIVED, [b"held"]),
    ]
    assert tracer.counters() == {"rx_packets": 5}
    tracer.close()
    assert device.closed == 1
