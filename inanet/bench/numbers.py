"""``ina bench numbers``: what the number formats do to training, beside what rounding to float32 does.

Three small models are trained by Gloo in float32, by Gloo with sums in float64, and through the fabric: by shared memory in
every mode, and by the systems. The difference of Gloo's two runs is what any change of rounding makes of a training; those
of the fabric are reported in it.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from inanet.bench.peers.rank import Team, team
from inanet.bench.tables import Column, aligned
from inanet.bench.torch import LEAST_DIFFERENCE, loss_differences, require_packages
from inanet.launch.fabric import Fabric
from inanet.launch.process import child, python, python_environment

#: seconds that ranks may take to start (importing torch) and to train
_START, _ANSWER = 120.0, 300.0
RANKS = 4
#: model: steps of its training
MODELS = {"cnn": 55, "transformer": 55, "embedding": 55}
MODES = ("prologue", "carried", "fixed")
DEFAULT = "prologue"
SYSTEMS = ("xagg", "switchml", "a2tp", "netreduce")
#: most that the largest and the median difference may be, in those of Gloo's two runs
MOST_LARGEST, MOST_MEDIAN = 20.0, 5.0


def run(places: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Train at ``places``: "shared memory" and systems (empty: all).

    Raises :class:`~inanet.service.exits.Failure` if torch or scikit-learn is missing.
    """
    require_packages()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"schema": 1, "rows": rows, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="inanet-numbers-") as name:
        digits = Path(name) / "digits.npz"
        subprocess.run(python("inanet.data.digits", str(digits)), env=python_environment(), check=True)
        for place in places or ("shared memory", *SYSTEMS):
            with _fabric(place) as fabric:
                sockets = [str(fabric.worker_socket(rank % fabric.workers)) for rank in range(RANKS)]
                with _team(Path(name) / place.replace(" ", "-"), digits, sockets, place) as ranks:
                    modes = MODES if place in ("shared memory", "xagg") else (DEFAULT,)
                    meter = _Meter(len(set(sockets)))
                    for model, steps in MODELS.items():
                        say(f"{place}: {model}")
                        rows += _compare(ranks, meter, place, model, steps, modes)
    result["ok"] = all(row["bit_identical"] and row["met"] is not False for row in rows)
    return result


def _fabric(place: str) -> Fabric:
    if place == "shared memory":
        return Fabric(topology=[("ps", None), ("worker0", "ps")])
    return Fabric(RANKS, 2) if place == "xagg" else Fabric(RANKS, system=place)


def _team(directory: Path, digits: Path, sockets: list[str], place: str) -> Any:
    directory.mkdir()

    def spawn(rank: int, command: Any, **options: Any) -> Any:
        environment = python_environment() | {"INA_SOCKET": sockets[rank]}
        if place != "shared memory":
            environment |= {"LOCAL_WORLD_SIZE": "1", "INA_SYSTEM": place}
        return child(command, environment, **options)

    commands = [
        python("inanet.bench.peers.ddp", str(rank), str(RANKS), str(directory / "gloo"), str(digits))
        for rank in range(RANKS)
    ]
    return team("numbers", directory, commands, _START, spawn)


class _Meter:
    """Bytes that the agents of ``hosts`` send: ranks tell what theirs has sent since it began, the first of each host first."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._before = 0

    def passed(self, answers: list[dict[str, Any]]) -> int:
        """Since it was read last."""
        total = sum(answer["sent"] for answer in answers[: self._hosts])
        self._before, passed = total, total - self._before
        return int(passed)


def _compare(
    ranks: Team, meter: _Meter, place: str, model: str, steps: int, modes: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    def train(way: str, mode: str = DEFAULT) -> dict[str, Any]:
        question = {"do": "train", "way": way, "model": model, "steps": steps, "mode": mode}
        answers = ranks.ask(question, _ANSWER, f"training {model} by {way}")
        first: dict[str, Any] = answers[0]
        first["same"] = len({answer["digest"] for answer in answers}) == 1
        first["bytes"] = meter.passed(answers) if way == "ina" else 0
        return first

    gloo, double = train("gloo"), train("double")
    rounding = loss_differences(gloo["losses"], double["losses"])
    for mode in modes:
        ours, again = train("ina", mode), train("ina", mode)
        yield judge(place, model, mode, ours, again, gloo, rounding)


def judge(
    place: str,
    model: str,
    mode: str,
    ours: dict[str, Any],
    again: dict[str, Any],
    gloo: dict[str, Any],
    rounding: list[float],
) -> dict[str, Any]:
    """One row: a training through the fabric against Gloo's, in the ``rounding`` of Gloo's own at each step."""
    differences = loss_differences(ours["losses"], gloo["losses"])
    largest = max(differences) / max(*rounding, LEAST_DIFFERENCE)
    middle = median(differences) / max(median(rounding), LEAST_DIFFERENCE)
    same = ours["same"] and again["same"] and ours["digest"] == again["digest"]
    return {
        "place": place,
        "model": model,
        "mode": mode,
        "loss_diff_max": max(differences),
        "loss_diff_median": median(differences),
        "gloo_diff_max": max(rounding),
        "gloo_diff_median": median(rounding),
        "ratio_max": largest,
        "ratio_median": middle,
        "accuracy": ours["accuracy"],
        "gloo_accuracy": gloo["accuracy"],
        "bytes": ours["bytes"],
        "bit_identical": same and ours["losses"] == again["losses"],
        "met": largest <= MOST_LARGEST and middle <= MOST_MEDIAN if mode == DEFAULT else None,
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """Rows for people."""
    yield f"# {result['cores']} cores; {RANKS} ranks; losses beside Gloo's, relative, at {MODELS['cnn']} steps"
    yield "# ratio: that difference in the one between Gloo's sums in float32 and in float64"
    columns: dict[str, Column] = {
        "place": "",
        "model": "",
        "mode": "",
        "largest": ("loss_diff_max", ".1e"),
        "median": ("loss_diff_median", ".1e"),
        "ratio max": ("ratio_max", ".1f"),
        "ratio median": ("ratio_median", ".1f"),
        "accuracy": ".1%",
        "(Gloo)": ("gloo_accuracy", ".1%"),
        "MB sent": ("bytes", ".1f", 1e-6),
        "bits": ("bit_identical", lambda same: "same" if same else "DIFFER"),
        "": ("met", lambda met: {True: "met", False: "missed", None: ""}[met]),
    }
    yield from aligned(columns, result["rows"])
    yield f"# marks: at most {MOST_LARGEST:g} for the largest and {MOST_MEDIAN:g} for the median, mode {DEFAULT}"
