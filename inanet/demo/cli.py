"""``ina demo``: train a small classifier through a fabric of real daemons on this machine."""

import importlib.util
import json
import sys
from typing import Any

import click

from inanet.demo import report
from inanet.demo.run import Options, Outcome, run
from inanet.launch.interrupts import Interrupted, Interrupts
from inanet.proto.slots.systems import TREES, tensor_systems
from inanet.service.exits import Exit, Failure, extra

#: The recorded gradients of a run take 77 kB a step.
MAX_STEPS = 2000
#: the system of sparse models, which has a demo of its own, and its models
SPARSE = "zebra"
#: the one of asynchronous training, where a step is an epoch
EPOCHS = "goat-async"
MODELS = ("lr", "fm", "ncf")


def known_system(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuse systems that this version does not have."""
    if value not in (TREES, *tensor_systems(), SPARSE):
        raise click.BadParameter(
            f"{value!r} is not in this version; it has: {', '.join((TREES, *tensor_systems(), SPARSE))}."
        )
    return value


@click.command()
@click.option(
    "--system",
    default=TREES,
    show_default=True,
    callback=known_system,
    help=f"Which system aggregates: {', '.join((TREES, *tensor_systems(), SPARSE))}.",
)
@click.option("--workers", type=click.IntRange(1, 16), default=4, show_default=True, help="Worker daemons.")
@click.option(
    "--steps", type=click.IntRange(1, MAX_STEPS), default=200, show_default=True, help="Training steps."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=1,
    show_default=True,
    help="Of weights, batches and impairments.",
)
@click.option(
    "--impair",
    type=click.FloatRange(0.0, 0.2),
    default=0.0,
    show_default=True,
    metavar="PROB",
    help="Lose, duplicate, reorder and corrupt packets on every hop with this probability each.",
)
@click.option("--model", type=click.Choice(MODELS), help="zebra: the model; fm unless given.")
@click.option(
    "--data",
    help="zebra: a libsvm file or click log, or corpus (unless given), corpus+tests, corpus+packages, interactions.",
)
@click.option(
    "--hot",
    type=click.Choice(("sampled", "online")),
    help="zebra: find hot parameters in a sample (unless given), or while training runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def demo(
    system: str, workers: int, steps: int, seed: int, impair: float, as_json: bool, **for_zebra: str | None
) -> None:
    """Train a classifier of handwritten digits, data-parallel, through daemons on this machine.

    Starts WORKERS ina-worker, two ina-agg (or one ina-switch, for systems that sum in a switch) and one ina-ps on
    127.0.0.1 without privileges, trains, repeats the
    training in a single process and compares. Exit status 0 if both agree within the stated bound, 1 if not.

    goat-async trains asynchronously, STEPS epochs through three ina-switch, with workers that are late: what is compared is the
    loss.

    zebra trains a sparse model on Python's own sources instead, through an ina-switch and two ina-ps, with WORKERS processes that
    push and pull keys, and repeats that in a single process.
    """
    given = {name: value for name, value in for_zebra.items() if value is not None}
    if system == SPARSE:
        sparse({"workers": workers, "steps": steps, "seed": seed, "impair": impair, **given}, as_json)
        return
    if given:
        raise click.UsageError(f"--{next(iter(given))} is for --system {SPARSE}; leave it out.")
    if importlib.util.find_spec("sklearn") is None:
        fail(
            f"scikit-learn, whose digits it trains on, is missing: {extra('demo')}",
            Exit.MISSING,
            as_json,
        )
    options = Options(workers=workers, steps=steps, seed=seed, impair=impair, system=system)
    if system == EPOCHS:
        epochs(options, as_json)
        return
    try:
        with Interrupts() as interrupts, report.progress(sys.stderr) as show:
            outcome = run(options, show, interrupts.check)
    except Interrupted as signal_name:
        click.echo(f"{signal_name}: every process was ended and every file removed", err=True)
        sys.exit(Exit.INTERRUPTED)
    except Failure as error:
        fail(str(error), error.code, as_json)
    present(outcome, as_json)
    sys.exit(Exit.OK if outcome.ok else Exit.FAILED)


def sparse(options: dict[str, Any], as_json: bool) -> None:
    """Zebra's demo."""
    from inanet.demo.sparse_demo import Options as Sparse
    from inanet.demo.sparse_demo import line, table
    from inanet.demo.sparse_demo import run as train
    from inanet.training.sparse import Step

    every = max(1, options["steps"] // 20)

    def tell(step: Step) -> None:
        if step.number % every == 0 or step.changed:
            click.echo(f"# {line(step)}", err=True)

    def say(text: str) -> None:
        click.echo(f"# {text}", err=True)

    try:
        with Interrupts() as interrupts:
            result = train(Sparse(**options), tell, interrupts.check, say=say)
    except Interrupted as signal_name:
        click.echo(f"{signal_name}: every process was ended and every file removed", err=True)
        sys.exit(Exit.INTERRUPTED)
    except Failure as error:
        fail(str(error), error.code, as_json)
    click.echo(json.dumps(result) if as_json else "\n".join(table(result)))
    sys.exit(Exit.OK if result["ok"] else Exit.FAILED)


def epochs(options: Options, as_json: bool) -> None:
    """GOAT's asynchronous training."""
    from inanet.demo.epochs_demo import run as train
    from inanet.demo.epochs_demo import table, to_dict

    try:
        with Interrupts() as interrupts, report.progress(sys.stderr) as show:
            result = train(options, show, interrupts.check)
    except Interrupted as signal_name:
        click.echo(f"{signal_name}: every process was ended and every file removed", err=True)
        sys.exit(Exit.INTERRUPTED)
    except Failure as error:
        fail(str(error), error.code, as_json)
    click.echo(json.dumps(to_dict(result)) if as_json else "\n".join(table(result)))
    sys.exit(Exit.FAILED if result.problems else Exit.OK)


def present(outcome: Outcome, as_json: bool) -> None:
    """Show the outcome on standard output."""
    if as_json:
        click.echo(json.dumps(report.to_dict(outcome)))
    else:
        report.print_table(outcome, sys.stdout)


def fail(message: str, status: int, as_json: bool) -> None:
    """Say why there is no outcome and exit."""
    if as_json:
        click.echo(json.dumps(report.failure(message)))
    click.echo(f"ina demo: {message}", err=True)
    sys.exit(status)
