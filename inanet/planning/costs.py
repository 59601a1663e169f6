"""What summing costs beside the bytes: processor time per fragment, and the least time of a round. Measured once.

A fragment is 1024 bytes of payload. The defaults were measured on two virtual cores over the loopback; a measurement
of this machine (``ina plan --calibrate``) replaces them and is kept in a file.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

#: Of the file's contents.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Costs:
    """Nanoseconds of processor time per fragment, and seconds per round."""

    #: a worker's host: quantise, send, receive the result, convert it back
    worker_ns: float = 1700.0
    #: a node that sums: receive, check and add one child's contribution
    sum_ns: float = 440.0
    #: and send one copy of the result
    result_ns: float = 240.0
    #: a rank of a ring: send, receive and add
    ring_ns: float = 590.0
    #: the shortest round through one server, and what another server on the way adds
    round_s: float = 0.6e-3
    hop_s: float = 0.3e-3
    #: one step of a ring
    step_s: float = 0.4e-3
    #: whether this machine was measured
    measured: bool = False

    @property
    def core_bps(self) -> float:
        """Contributions, in bits per second of payload, that one core sums and answers: the figure of section V's
        second criterion."""
        return 1024 * 8 / ((self.sum_ns + self.result_ns) * 1e-9)


def cache_file() -> Path:
    """Where a measurement of this machine is kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "inanet" / "costs.json"


def load(path: Path | None = None) -> Costs:
    """The measurement that is kept, or the defaults if there is none that can be read."""
    path = path or cache_file()
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return Costs()
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return Costs()
    values = {name: data.get(name) for name in asdict(Costs()) if name != "measured"}
    if not all(isinstance(value, int | float) and value > 0 for value in values.values()):
        return Costs()
    return Costs(**{name: float(value) for name, value in values.items()}, measured=True)  # type: ignore[arg-type]


def save(costs: Costs, path: Path | None = None) -> Path:
    """Keep a measurement; returns where."""
    path = path or cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in asdict(costs).items() if name != "measured"}
    path.write_text(json.dumps({"schema": SCHEMA, **values}, indent=2) + "\n")
    return path
