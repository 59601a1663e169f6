"""``ina demo --system zebra``: train a sparse model on Python's own sources, or on a file, hot parameters summed by the emulated
switch. They are looked for in a sample before training, or while it runs.

Ranks, PS shards and the switch are machines of this process with a UDP socket each on 127.0.0.1, and every packet between
them is real. The training is repeated without impairments and must give the same model, bit for bit; and once more with a PS
alone, whose loss must be the same up to what integers of the switch round off.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from inanet.client.sparse import Phy, SparseGroup, sparse_group
from inanet.demo.clicks import CORPUS, BadData, Samples
from inanet.demo.datasets import load
from inanet.demo.sparse_models import MODELS, Model
from inanet.demo.sparse_training import Step, Trained, hot_by_sampling, train
from inanet.proto.plan import Online
from inanet.proto.zebra.program import DEFAULT_BUDGET

SCHEMA = 1
SHARDS = 2
#: samples of a worker's batch, and of those that are held out
BATCH, HELD_OUT = 32, 2000
#: share of the batches that hot parameters are looked for in
SAMPLING = 0.08
#: online: after this share of the steps, and every time that many have passed (Table II), they are counted again
ONLINE = 0.05
#: a list is in use until another is this far from it; earlier counts keep this much of their weight
THRESHOLD, FADING = 0.2, 0.8
How = Literal["sampled", "online"]
#: gradients are in steps of 2^-26, and below 1: those of vectors are small
SHIFT = 26
#: most that the held-out loss may differ from that with a PS alone, nats
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Options:
    """As on the command line. ``model`` is one of :data:`~inanet.demo.sparse_models.MODELS`, ``data`` a name or a file of
    :func:`~inanet.demo.datasets.load`, ``hot`` how hot parameters are found.
    """

    workers: int = 4
    steps: int = 200
    seed: int = 1
    impair: float = 0.0
    model: str = "fm"
    data: str = CORPUS
    hot: How = "sampled"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all runs share."""

    options: Options
    model: Model
    batches: list[Samples]
    held_out: Samples
    hot: Any


def run(
    options: Options,
    tell: Callable[[Step], None],
    check: Callable[[], None] = lambda: None,
    samples: Samples | None = None,
) -> dict[str, Any]:
    """The three trainings and what came of them, as ``--json`` prints it. ``check`` is called between steps and may raise.

    Raises :class:`~inanet.demo.clicks.BadData` for data that cannot be read or are too few.
    """
    plan = _plan(options, (samples or load(options.data)).shuffled(options.seed))

    def told(step: Step) -> None:
        tell(step)
        check()

    live, group = _train(plan, told, switch=True, impair=options.impair, phy="udp")
    again, _ = _train(plan, lambda step: check(), switch=True, impair=0.0, phy="memory")
    alone, _ = _train(plan, lambda step: check(), switch=False, impair=0.0, phy="memory")
    identical = bool((live.keys == again.keys).all()) and live.values.tobytes() == again.values.tobytes()
    positive = float(plan.held_out.labels.mean())
    guess = -sum(p * np.log(p) for p in (positive, 1 - positive) if p > 0)
    difference = abs(live.loss - alone.loss)
    return {
        "schema": SCHEMA,
        "ok": identical and live.loss < guess and difference <= TOLERANCE,
        "system": "zebra",
        "shards": SHARDS,
        **asdict(options),
        "parameters": len(live.keys),
        "changes_of_the_hot_set": sum(step.changed for step in live.steps),
        "loss": live.loss,
        "loss_of_guessing": float(guess),
        "auc": live.auc,
        "identical_without_impairments": identical,
        "loss_with_ps_alone": alone.loss,
        "tolerance": TOLERANCE,
        "seconds": live.seconds,
        "seconds_with_ps_alone": alone.seconds,
        **group,
    }


def _plan(options: Options, samples: Samples) -> _Plan:
    if len(samples) < 2 * BATCH:
        raise BadData(f"{options.data} has {len(samples)} samples; training needs {2 * BATCH} at least")
    held_out = samples.take(np.arange(min(HELD_OUT, len(samples) // 5)))
    needed = options.steps * options.workers * BATCH
    # more steps than there are samples for go through them again
    rows = len(held_out) + np.arange(needed) % (len(samples) - len(held_out))
    batches = list(samples.take(rows).batches(BATCH))
    model = MODELS[options.model]()
    hot = None
    if options.hot == "sampled":
        hot = hot_by_sampling(batches, SAMPLING, options.seed, model, DEFAULT_BUDGET)
    return _Plan(options, model, batches, held_out, hot)


def _online(steps: int) -> Online:
    """As many as fit into a quarter of the registers: the ledger needs room too."""
    return Online(max(1, round(ONLINE * steps)), THRESHOLD, FADING, 0.25, DEFAULT_BUDGET, 100)


def _train(
    plan: _Plan, tell: Callable[[Step], None], *, switch: bool, impair: float, phy: Phy
) -> tuple[Trained, dict[str, Any]]:
    options, model = plan.options, plan.model
    with sparse_group(
        options.workers,
        SHARDS,
        width=model.width,
        optimiser=model.optimiser,
        initial=model.initial,
        switch=switch,
        phy=phy,
        impair=impair,
        seed=options.seed,
        online=_online(options.steps) if switch and plan.hot is None else None,
        shift=SHIFT,
    ) as group:
        if switch and plan.hot is not None:
            group.use_hot(plan.hot, shift=SHIFT)
        trained = train(group, model, plan.batches, plan.held_out, tell=tell)
        return trained, figures(group, trained)


def figures(group: SparseGroup, trained: Trained) -> dict[str, Any]:
    """What the machines have counted."""
    stats = group.stats()
    hot = sum(worker.hot_pairs for worker in group.workers)
    cold = sum(worker.cold_pairs for worker in group.workers)
    switch = stats.get("switch", {})
    return {
        "hot_pairs": hot,
        "cold_pairs": cold,
        "hot_parameters": len(group.hot),
        "in_network_share": group.in_network_share(),
        "keys_per_second": (hot + cold) / trained.seconds,
        "hot_sums": switch.get("sums", 0),
        "recirculations_per_packet": switch.get("recirculations", 0) / max(switch.get("packets", 0), 1),
        "repeated": sum(
            value
            for its in stats.values()
            for name, value in its.items()
            if name in ("repeated", "news_repeated", "cpu_repeated")
        ),
        "drops": {
            name.removeprefix("drop_"): sum(its.get(name, 0) for its in stats.values())
            for name in sorted({name for its in stats.values() for name in its if name.startswith("drop_")})
        },
    }


def line(step: Step) -> str:
    """A step as text."""
    total = max(step.hot + step.cold, 1)
    return (
        f"step {step.number + 1:4}  loss {step.loss:.4f}  to the switch {step.hot:6}  to the PS {step.cold:6}  "
        f"in network {step.hot / total:.0%}{'  other parameters are hot from now on' if step.changed else ''}"
    )


def table(result: dict[str, Any]) -> list[str]:
    """The outcome as text."""
    short = f"the run was too short to find hot parameters: more steps than {result['steps']} (--steps) let the switch sum some"
    return [
        f"# zebra: {result['workers']} workers, {result['shards']} PS shards, one switch; {result['steps']} steps of a model "
        f"with {result['parameters']} parameters, {result['hot_parameters']} of them hot",
        f"held out: loss {result['loss']:.4f} (guessing {result['loss_of_guessing']:.4f}, PS alone "
        f"{result['loss_with_ps_alone']:.4f}), area under the curve {result['auc']:.3f}",
        f"summed in the switch: {result['hot_pairs']} of {result['hot_pairs'] + result['cold_pairs']} gradients "
        f"({result['in_network_share']:.0%}), {result['recirculations_per_packet']:.4f} recirculations per packet",
        *([] if result["hot_parameters"] else [short]),
        f"{result['keys_per_second']:.0f} gradients per second; {result['repeated']} packets repeated",
        f"the same model without impairments: {'yes, bit for bit' if result['identical_without_impairments'] else 'NO'}",
    ]
