"""Results on their way to a worker: through its socket, and through the kernel program's ring.

A sender and the worker are sockets of one process at both ends of a virtual cable; processor time is that of the whole
machine, sender included. Frames come ``merged``, as a local sender or the interface makes them, or ``single``, and then
the socket has nobody who merges them.
"""

import select
import time
from contextlib import ExitStack

import numpy as np

from inanet.bench import hop
from inanet.bench.measure import ticks
from inanet.bench.veth import Cable
from inanet.phy.device import Device
from inanet.phy.interface import Feature, set_feature
from inanet.phy.udp import UdpDevice
from inanet.service.exits import Failure
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import address_of, endpoint
from inanet.wire.xagg import PAYLOAD_BYTES, ROW_BYTES, Kind
from inanet.xdp.attach import Attachment, load_inbox
from inanet.xdp.memory import Mode
from inanet.xdp.worker import InboxDevice

WORKER = endpoint(Cable.ADDRESSES[1], 7200)
PATHS = ("udp", "native", "generic")
#: fragments sent between two looks at what has come
_BURST = 62 * 16
_TICK = 0.01
_DEADLINE = 5.0


def _worker(cable: Cable, path: str, stack: ExitStack) -> Device:
    """The worker's device; its program, if it has one, takes what comes from the cable's near end."""
    device = cable.run(1, lambda: UdpDevice(*address_of(WORKER), rcvbuf=1 << 23))
    if path == "udp":
        stack.callback(device.close)
        return device
    mode: Mode = "native" if path == "native" else "generic"
    inbox = load_inbox(device.rx_budget, WORKER)
    stack.callback(inbox.close)
    inbox.follow({(hop.PARENT, hop.JOB): hop.KEY})
    attachment = cable.run(1, lambda: Attachment(inbox, Cable.NAMES[1], mode))
    stack.callback(attachment.close)
    worker = InboxDevice(device, inbox)
    stack.callback(worker.close)
    return worker


def results_path(path: str, fragments: int, seconds: float, *, merged: bool) -> dict[str, float]:
    """Gradient per second (``gbps``) and ``cpu_s_per_gb`` of one path.

    Raises :class:`~inanet.service.exits.Failure` if results that came are not handed out, and
    :class:`~inanet.xdp.attach.Unavailable`.
    """
    with Cable() as cable, ExitStack() as stack:
        if not merged:
            cable.run(0, lambda: set_feature(Cable.NAMES[0], Feature.CHECKSUMS, False))
        worker = _worker(cable, path, stack)
        sender = cable.run(0, lambda: UdpDevice(*address_of(hop.PARENT), sndbuf=1 << 22))
        stack.callback(sender.close)
        rows = hop.packets(fragments, Kind.RESULT, 0).view(np.uint8)
        offsets = np.arange(fragments, dtype=np.int64) * ROW_BYTES
        poller = select.poll()
        poller.register(worker.fileno(), select.POLLIN)
        got = total = 0
        before, start = ticks(), time.perf_counter()
        while time.perf_counter() - start < seconds:
            for first in range(0, fragments, _BURST):
                part = offsets[first : first + _BURST]
                sent = 0
                while sent < len(part):
                    sent += sender.send(Transmission(WORKER, rows, part, ROW_BYTES), sent)
                total += len(part)
                got += _drained(worker)
        # a driver's queue may be worked off by another processor
        while got < total and poller.poll(500) and time.perf_counter() - start < seconds + _DEADLINE:
            got += _drained(worker)
        elapsed, after = time.perf_counter() - start, ticks()
        if got < 0.9 * total:
            raise Failure(f"{path}: {total - got} of {total} results were lost")
    busy = ((after.total - after.idle) - (before.total - before.idle)) * _TICK
    size = got * PAYLOAD_BYTES
    return {"gbps": size * 8 / elapsed / 1e9, "cpu_s_per_gb": busy * 1e9 / size}


def _drained(worker: Device) -> int:
    got = 0
    while (batch := worker.receive()) is not None:
        got += len(batch)
    return got


def results_paths(fragments: int, seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """By how frames come, then by path; see :func:`results_path`."""
    return {
        kind: {path: results_path(path, fragments, seconds, merged=kind == "merged") for path in PATHS}
        for kind in ("merged", "single")
    }
