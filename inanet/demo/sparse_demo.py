"""``ina demo --system zebra``: train a sparse model on Python's own sources, or on a file, hot parameters summed by a switch. They
are looked for in a sample before training, or while it runs.

PS shards and the switch are the daemons, with a training process for each rank, on 127.0.0.1. The training is repeated in this
process without impairments and must give the same model, bit for bit; and once more with a PS alone, whose loss must be the same up
to what integers of the switch round off.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from inanet.data.clicks import CORPUS, BadData, Samples
from inanet.data.datasets import load
from inanet.demo.sparse_fabric import SYSTEM, Told, Training
from inanet.demo.sparse_fabric import train as train_live
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.switch import DEFAULT_BUDGET
from inanet.sparse.group import sparse_group
from inanet.training.sparse import Step, Trained, hot_by_sampling, train
from inanet.training.sparse_models import MODELS, Model
from inanet.wire.batch import U64

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
    """As on the command line. ``model`` is one of :data:`~inanet.training.sparse_models.MODELS`, ``data`` a name or a file of
    :func:`~inanet.data.datasets.load`, ``hot`` how hot parameters are found.
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
    """What all runs share. ``hot`` keys are known before, or found ``online``."""

    options: Options
    model: Model
    batches: Samples
    held_out: Samples
    hot: U64 | None
    online: Online | None


def run(
    options: Options,
    tell: Callable[[Step], None],
    check: Callable[[], None] = lambda: None,
    samples: Samples | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The three trainings and what came of them, as ``--json`` prints it. ``say`` is told what is being done; ``check`` is called
    all the time and may raise.

    Raises :class:`~inanet.data.clicks.BadData` for data that cannot be read or are too few, and as
    :func:`inanet.demo.sparse_fabric.train`.
    """
    plan = _plan(options, (samples or load(options.data, say)).shuffled(options.seed))
    told = _live(plan, tell, say, check)
    live = told.trained
    say("repeating the training in this process, without impairments and with a PS alone")
    again = _train(plan, check, switch=True)
    alone = _train(plan, check, switch=False)
    identical = (
        bool(np.array_equal(live.keys, again.keys)) and live.values.tobytes() == again.values.tobytes()
    )
    positive = float(plan.held_out.labels.mean())
    guess = -sum(p * np.log(p) for p in (positive, 1 - positive) if p > 0)
    difference = abs(live.loss - alone.loss)
    return {
        "schema": SCHEMA,
        "ok": identical and live.loss < guess and difference <= TOLERANCE,
        "system": SYSTEM,
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
        **figures(told),
    }


def _plan(options: Options, samples: Samples) -> _Plan:
    if len(samples) < 2 * BATCH:
        raise BadData(f"{options.data} has {len(samples)} samples; training needs {2 * BATCH} at least")
    held_out = samples.take(np.arange(min(HELD_OUT, len(samples) // 5)))
    needed = options.steps * options.workers * BATCH
    # more steps than there are samples for go through them again
    rows = len(held_out) + np.arange(needed) % (len(samples) - len(held_out))
    batches, model = samples.take(rows), MODELS[options.model]()
    if options.hot == "sampled":
        parts = list(batches.batches(BATCH))
        hot = hot_by_sampling(parts, SAMPLING, options.seed, model, DEFAULT_BUDGET)
        return _Plan(options, model, batches, held_out, hot, None)
    # as many as fit into a quarter of the registers: the ledger needs room too
    online = Online(max(1, round(ONLINE * options.steps)), THRESHOLD, FADING, 0.25, DEFAULT_BUDGET, 100)
    return _Plan(options, model, batches, held_out, None, online)


def _live(
    plan: _Plan, tell: Callable[[Step], None], say: Callable[[str], None], check: Callable[[], None]
) -> Told:
    """Through daemons."""
    options = plan.options
    training = Training(
        model=plan.model,
        batches=plan.batches,
        size=BATCH,
        held_out=plan.held_out,
        ranks=options.workers,
        shards=SHARDS,
        hot=plan.hot,
        online=plan.online,
        shift=SHIFT,
        impair=options.impair,
        seed=options.seed,
    )
    return train_live(training, tell, say, check)


def _train(plan: _Plan, check: Callable[[], None], *, switch: bool) -> Trained:
    """In this process, without impairments."""
    options, model = plan.options, plan.model
    with sparse_group(
        options.workers,
        SHARDS,
        width=model.width,
        optimiser=model.optimiser,
        initial=model.initial,
        switch=switch,
        online=plan.online if switch else None,
        shift=SHIFT,
    ) as group:
        if switch and plan.hot is not None:
            group.use_hot(plan.hot, shift=SHIFT)
        batches = list(plan.batches.batches(BATCH))
        return train(group, model, batches, plan.held_out, tell=lambda step: check())


def figures(told: Told) -> dict[str, Any]:
    """What ranks and daemons have counted."""
    hot = sum(rank["hot_pairs"] for rank in told.ranks)
    cold = sum(rank["cold_pairs"] for rank in told.ranks)
    switch = told.daemons["switch0"]["programs"][SYSTEM]
    drops: Counter[str] = Counter()
    for rank in told.ranks:
        drops.update({name[5:]: count for name, count in rank.items() if name.startswith("drop_")})
    for daemon in told.daemons.values():
        drops.update(daemon["drops"])
    return {
        "hot_pairs": hot,
        "cold_pairs": cold,
        "hot_parameters": told.hot,
        "in_network_share": hot / max(hot + cold, 1),
        "keys_per_second": (hot + cold) / told.trained.seconds,
        "hot_sums": switch["sums"],
        "recirculations_per_packet": switch["recirculations"] / max(switch["packets"], 1),
        "repeated": switch.get("cpu_repeated", 0)
        + sum(rank["repeated"] for rank in told.ranks)
        + sum(daemon.get("sparse_news_repeated", 0) for daemon in told.daemons.values()),
        "drops": {reason: count for reason, count in sorted(drops.items()) if count},
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
