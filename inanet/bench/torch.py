"""``ina bench torch``: DistributedDataParallel with the hook, and by Gloo, on one host and on shaped links.

Steps are measured with and without communication, all ways in turn: what communication costs is the
difference. Training the digits twice through the fabric and once by Gloo shows what it does to losses. Metrics are
reductions of one element each, by the process group "ina" and by Gloo.
"""

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inanet.bench.bounds import ring, tree
from inanet.bench.marks import Mark, find
from inanet.bench.measure import median
from inanet.bench.peers.rank import Team, team
from inanet.bench.tables import Column, aligned
from inanet.lab.library import topology as packaged
from inanet.lab.namespaces import Unprivileged, require_privileges
from inanet.launch.fabric import Fabric
from inanet.launch.process import child, python, python_environment
from inanet.service.exits import Exit, Failure, extra

#: seconds that ranks may take to start (importing torch) and to answer
_START = 120.0
_ANSWER = 240.0
#: the shaped network: workers of 200 Mbit/s under a server with a faster link
TOPOLOGY = "star4-slow-workers"
#: steps of the training run
TRAINING_STEPS = 55
#: times as many steps of metrics as of training
_METRICS_STEPS = 10
_WAYS = ("alone", "gloo", "ina")
#: bytes of the MLP's gradients
MLP_BYTES = 4 * 4_349_962
#: what a prediction may be off
MOST_ERROR = 0.10
#: a difference below which losses are the same: half a unit in the last place of float32
LEAST_DIFFERENCE = 2.0**-24
#: how far losses may be from Gloo's, in what Gloo's own rounding makes of them: its sums in float32 against float64
MOST_RATIO = 20.0


def run(places: tuple[str, ...], repetitions: int, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure at ``places`` ("local", "lab"; empty: all that can be had here).

    Raises :class:`Failure` if torch or scikit-learn is missing, or for a place asked for that cannot be had.
    """
    require_packages()
    missing = _missing_for_labs()
    if "lab" in places and missing is not None:
        raise missing
    result: dict[str, Any] = {"schema": 1, "ok": True, "rows": [], "skipped": [], "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="inanet-torch-") as name:
        digits = Path(name) / "digits.npz"
        subprocess.run(python("inanet.data.digits", str(digits)), env=python_environment(), check=True)
        if "local" in places or not places:
            say("local: 4 ranks on this host")
            with _local(Path(name), digits) as team:
                result["rows"] += _time(team, "local", repetitions, steps)
                result["rows"] += _metrics(team, "local", repetitions, steps)
                say("local: training the digits")
                result |= _train(team)
        if "lab" in places or (not places and missing is None):
            say(f"lab: {TOPOLOGY}")
            with _lab(digits) as team:
                result["rows"] += _time(team, "lab", repetitions, steps)
                result["rows"] += _metrics(team, "lab", repetitions, steps)
        elif not places:
            result["skipped"].append(f"lab: {missing}")
    for place in ("local", "lab"):
        key = "communication_seconds" if place == "local" else "step_seconds"
        result[f"ratio_to_gloo_{place}"] = _ratio(result["rows"], place, "mlp", key)
        result[f"metrics_ratio_to_gloo_{place}"] = _ratio(result["rows"], place, "metrics", "step_seconds")
    result["predicted_ratio_lab"] = _predicted(result["rows"])
    result["marks"] = _marks(result)
    result["load"] = os.getloadavg()[0]
    result["ok"] = (
        bool(result.get("bit_identical", True)) and result.get("loss_diff_ratio", 0.0) <= MOST_RATIO
    )
    return result


def require_packages() -> None:
    """Raises :class:`Failure` if torch or scikit-learn is missing."""
    for package, name in (("torch", "torch"), ("sklearn", "demo")):
        if importlib.util.find_spec(package) is None:
            failure = Failure(f"{package} is not installed: {extra(name)}")
            failure.code = Exit.MISSING
            raise failure


@contextmanager
def _local(directory: Path, digits: Path) -> Iterator[Team]:
    """Four ranks at one agent."""
    world = 4
    with Fabric(topology=[("ps", None), ("worker0", "ps")]) as fabric:
        environment = python_environment() | {"INA_SOCKET": str(fabric.worker_socket(0))}

        def spawn(rank: int, command: Sequence[str], **options: Any) -> Any:
            return child(command, environment, **options)

        commands = [_rank(rank, world, directory / "gloo", digits) for rank in range(world)]
        with team("ddp", directory, commands, _START, spawn) as ranks:
            yield ranks


def _rank(rank: int, world: int, rendezvous: Path, digits: Path) -> list[str]:
    return python("inanet.bench.peers.ddp", str(rank), str(world), str(rendezvous), str(digits))


def _missing_for_labs() -> Failure | None:
    """Why there can be no lab here: exit status 5 without pyroute2, 4 without the privileges."""
    if importlib.util.find_spec("pyroute2") is None:
        failure = Failure(f"pyroute2 is not installed: {extra('net')}")
        failure.code = Exit.MISSING
        return failure
    try:
        require_privileges()
    except Unprivileged as error:
        return error
    return None


@contextmanager
def _lab(digits: Path) -> Iterator[Team]:
    """One rank on each host of the shaped network. Needs root."""
    from inanet.lab.fabric import Daemons, ranks
    from inanet.lab.session import Lab

    with Lab(TOPOLOGY) as lab, Daemons(lab, {"control": {"insecure": True}}) as daemons:
        places = ranks(lab.topology)

        def spawn(rank: int, command: Sequence[str], **options: Any) -> Any:
            environment = python_environment() | daemons.environment(places[rank])
            return lab.spawn(places[rank].host, command, env=environment, **options)

        commands = [_rank(one.rank, one.world, lab.directory / "rendezvous", digits) for one in places]
        with team("ddp", lab.directory, commands, _START, spawn) as processes:
            yield processes


def _time(team: Team, place: str, repetitions: int, steps: int) -> list[dict[str, Any]]:
    """Rows of all ways and models; each repetition is that of the slowest rank."""
    samples: dict[tuple[str, str], list[float]] = {}
    for repetition in range(repetitions + 1):
        for model in ("mlp", "cnn"):
            for way in _WAYS:
                question = {"do": "time", "way": way, "model": model, "steps": steps}
                answers = team.ask(question, _ANSWER, f"{steps} steps of {model} by {way}")
                if repetition:
                    samples.setdefault((model, way), []).append(max(one["seconds"] for one in answers))
    rows = []
    for (model, way), seconds in samples.items():
        alone = median(samples[model, "alone"])
        step = median(seconds)
        rows.append(
            {
                "place": place,
                "model": model,
                "system": way,
                "step_seconds": step,
                "communication_seconds": max(0.0, step - alone),
                "communication_share": max(0.0, step - alone) / step,
                "samples": seconds,
            }
        )
    return rows


def _metrics(team: Team, place: str, repetitions: int, steps: int) -> list[dict[str, Any]]:
    """Rows of the reductions between steps, both ways in turn; each repetition is that of the slowest rank."""
    samples: dict[str, list[float]] = {}
    for repetition in range(repetitions + 1):
        for way in ("gloo", "ina"):
            question = {"do": "metrics", "way": way, "model": "metrics", "steps": _METRICS_STEPS * steps}
            answers = team.ask(question, _ANSWER, f"metrics by {way}")
            if repetition:
                samples.setdefault(way, []).append(max(one["seconds"] for one in answers))
    return [
        {
            "place": place,
            "model": "metrics",
            "system": way,
            "step_seconds": median(seconds),
            "communication_seconds": median(seconds),
            "communication_share": 1.0,
            "samples": seconds,
        }
        for way, seconds in samples.items()
    ]


def _train(team: Team) -> dict[str, Any]:
    """The figures of the training runs."""
    answers = {}
    for name, way in (("ina", "ina"), ("again", "ina"), ("gloo", "gloo"), ("double", "double")):
        question = {"do": "train", "way": way, "model": "cnn", "steps": TRAINING_STEPS}
        answers[name] = team.ask(question, _ANSWER, f"training by {way}")
    ina, gloo, double = (answers[name][0] for name in ("ina", "gloo", "double"))
    differences = loss_differences(ina["losses"], gloo["losses"])
    rounding = max(loss_differences(gloo["losses"], double["losses"]))
    digests = {one["digest"] for name in ("ina", "again") for one in answers[name]}
    return {
        "loss_diff_max": max(differences),
        "loss_diff_step": differences.index(max(differences)),
        "loss_diff_double": rounding,
        # one float32 apart is no difference
        "loss_diff_ratio": max(differences) / max(rounding, LEAST_DIFFERENCE),
        "bit_identical": len(digests) == 1 and answers["again"][0]["losses"] == ina["losses"],
        "accuracy": {"ina": ina["accuracy"], "gloo": gloo["accuracy"]},
    }


def loss_differences(ours: list[float], theirs: list[float]) -> list[float]:
    """The difference at each step, relative to ``theirs``."""
    return [abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)]


def _ratio(rows: list[dict[str, Any]], place: str, model: str, key: str) -> float | None:
    found = {row["system"]: row[key] for row in rows if (row["place"], row["model"]) == (place, model)}
    return found["ina"] / found["gloo"] if found.get("gloo") else None


def _predicted(rows: list[dict[str, Any]]) -> float | None:
    """Step time through the fabric over that by a ring, as the lab's links have it.

    Communication is added to what a step takes without: buckets that backward hides are too few to count.
    """
    row = find(rows, place="lab", model="mlp", system="alone")
    if row is None:
        return None
    alone: float = row["step_seconds"]
    topology = packaged(TOPOLOGY)
    return (alone + tree(topology, MLP_BYTES)) / (alone + ring(topology, MLP_BYTES))


def _marks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What is claimed: of the MLP half of Gloo's communication on one host, and on shaped links what the plan predicts;
    of metrics at most Gloo's time."""
    predicted = result["predicted_ratio_lab"]
    most = None if predicted is None else min(1.0, (1 + MOST_ERROR) * predicted)
    claims = [
        ("mlp", "local", "communication, 4 ranks on one host", 0.5),
        ("mlp", "lab", "step, 4 hosts, as predicted", most),
        ("metrics", "local", "4 ranks on one host", 1.0),
        ("metrics", "lab", "4 hosts", 1.0),
    ]
    keys = {"mlp": "ratio_to_gloo", "metrics": "metrics_ratio_to_gloo"}
    rows = [
        {"model": model, "place": place, "ratio": result[f"{keys[model]}_{place}"]}
        for model, place, _, _ in claims
    ]
    return [
        Mark(
            f"{model}, {what}: time over Gloo's", "ratio", {"model": model, "place": place}, most=limit
        ).judge(rows)
        for model, place, what, limit in claims
    ]


def table(result: dict[str, Any]) -> Iterator[str]:
    """Rows for people."""
    yield f"# {result['cores']} cores, load {result['load']:.1f}; 4 ranks, medians of interleaved repetitions"
    yield "# alone: without communication, which costs the others the difference (comm)"
    times: dict[str, Column] = {
        "step ms": ("step_seconds", ".2f", 1e3),
        "comm ms": ("communication_seconds", ".2f", 1e3),
        "comm share": ("communication_share", ".1%"),
    }
    yield from aligned({"place": "", "model": "", "system": "", **times}, result["rows"])
    for key, words in (
        ("ratio_to_gloo_local", "communication of mlp, to Gloo's, local"),
        ("ratio_to_gloo_lab", "step time of mlp, to Gloo's, lab"),
        ("metrics_ratio_to_gloo_local", "metrics, to Gloo's, local"),
        ("metrics_ratio_to_gloo_lab", "metrics, to Gloo's, lab"),
        ("predicted_ratio_lab", "the same, as the plan predicts"),
        ("loss_diff_max", "largest difference of the losses from Gloo's"),
        ("loss_diff_step", "the step where that is"),
        ("loss_diff_double", "largest difference of Gloo's losses from those with float64 sums"),
        ("loss_diff_ratio", f"the one over the other, at most {MOST_RATIO:g}"),
        ("bit_identical", "the same bits in both runs"),
    ):
        if result.get(key) is not None:
            value = result[key]
            yield f"# {words}: {value if isinstance(value, bool) else f'{value:.3g}'}"
    for mark in result["marks"]:
        if mark["met"] is not None:
            outcome = "met" if mark["met"] else "missed"
            yield f"# {mark['name']} {mark['value']:.3g}, at most {mark['most']:.3g}: {outcome}"
    for reason in result["skipped"]:
        yield f"# skipped {reason}"
