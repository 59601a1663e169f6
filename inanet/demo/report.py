"""What the demo shows: progress while it runs, then a table or one JSON object."""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from inanet.demo.run import Outcome, Show

#: Version of the JSON object.
SCHEMA = 1
#: Keys that the object always has.
KEYS = (
    "schema",
    "ok",
    "accuracy",
    "baseline_accuracy",
    "bytes_into_ps",
    "bytes_without_ina",
    "in_network_share",
    "retransmissions",
    "identical_weights",
    "seconds",
)
#: Seconds between progress lines where no terminal shows a moving bar.
PLAIN_EVERY = 1.0


def has_rich() -> bool:
    """Whether the optional package for terminals is installed."""
    return importlib.util.find_spec("rich") is not None


class PlainProgress:
    """Lines of text: every stage, and the training step once a second."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.next_line = 0.0

    def stage(self, text: str) -> None:
        """A line of its own."""
        print(f"# {text}", file=self.stream, flush=True)

    def step(self, step: int, steps: int, loss: float) -> None:
        """A line, unless the last one is too recent."""
        now = time.monotonic()
        if now >= self.next_line:
            self.next_line = now + PLAIN_EVERY
            print(f"# step {step:>5} of {steps}, loss {loss:.4f}", file=self.stream, flush=True)


@contextmanager
def progress(stream: TextIO) -> Iterator[Show]:
    """Progress on a stream: a moving bar on a terminal if rich is installed, lines otherwise."""
    if not (stream.isatty() and has_rich()):
        yield PlainProgress(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    class Bar:
        def __init__(self, bar: Progress) -> None:
            self.bar = bar
            self.task = bar.add_task("", total=None, loss="")

        def stage(self, text: str) -> None:
            self.bar.update(self.task, description=text)

        def step(self, step: int, steps: int, loss: float) -> None:
            self.bar.update(self.task, total=steps, completed=step, loss=f"loss {loss:.4f}")

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=Console(file=stream)) as bar:
        yield Bar(bar)


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The JSON object: :data:`KEYS` and more. Fractions are 0 to 1, times seconds, sizes bytes."""
    verdict, traffic = outcome.verdict, outcome.traffic
    return {
        "schema": SCHEMA,
        "ok": outcome.ok,
        "accuracy": verdict.accuracy,
        "baseline_accuracy": verdict.baseline_accuracy,
        "bytes_into_ps": traffic.bytes_into_ps,
        "bytes_without_ina": traffic.bytes_without_ina,
        "in_network_share": traffic.in_network_share,
        "retransmissions": traffic.retransmissions,
        "identical_weights": outcome.identical_weights,
        "seconds": outcome.seconds,
        "loss": verdict.loss,
        "baseline_loss": verdict.baseline_loss,
        "max_weight_difference": verdict.max_weight_difference,
        "bound": verdict.bound,
        "gradient_error": verdict.gradient_error,
        "gradient_bound": verdict.gradient_bound,
        "weights": verdict.weights,
        "steps": outcome.options.steps,
        "steps_per_second": outcome.steps_per_second,
        "drops": traffic.drops,
        "slot_collisions": traffic.slot_collisions,
        "sums_by_switch": traffic.sums_by_switch,
        "system": outcome.options.system,
        "workers": outcome.options.workers,
        "impair": outcome.options.impair,
        "seed": outcome.options.seed,
        "problems": list(outcome.problems),
    }


def failure(message: str) -> dict[str, Any]:
    """The JSON object of a run that came to no result: all :data:`KEYS`, unknown ones null, and ``error``."""
    return {**dict.fromkeys(KEYS), "schema": SCHEMA, "ok": False, "error": message}


def size(count: float) -> str:
    """Bytes for people, in decimal units: ``"23.4 MB"``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """The table: what, its value through the fabric, what to compare it with."""
    verdict, traffic = outcome.verdict, outcome.traffic
    alone = "in a single process"
    lines = [
        ("accuracy, held-out digits", f"{verdict.accuracy:.2%}", f"{verdict.baseline_accuracy:.2%} {alone}"),
        ("loss on them", f"{verdict.loss:.5f}", f"{verdict.baseline_loss:.5f} {alone}"),
        (
            f"weights of {outcome.options.workers} workers",
            "bit-identical" if outcome.identical_weights else "DIFFERENT",
            "",
        ),
        ("largest weight difference", f"{verdict.max_weight_difference:.3g}", f"{verdict.bound:.3g} allowed"),
        ("worst gradient error", f"{verdict.gradient_error:.3g}", f"{verdict.gradient_bound:.3g} allowed"),
        ("steps per second", f"{outcome.steps_per_second:.0f}", ""),
        (
            "bytes into the PS",
            size(traffic.bytes_into_ps),
            f"{size(traffic.bytes_without_ina)} without aggregation",
        ),
        ("in-network share", f"{traffic.in_network_share:.1%}", "summed before the PS"),
        ("retransmissions", str(traffic.retransmissions), ""),
    ]
    if traffic.slot_collisions is not None:
        lines.append(("slot collisions", str(traffic.slot_collisions), "packets, at the switch"))
    lines += [
        (f"summed at {name}", str(count), "fragments") for name, count in traffic.sums_by_switch.items()
    ]
    lines += [(f"dropped, {reason}", str(count), "packets") for reason, count in traffic.drops.items()]
    lines.append(("seconds", f"{outcome.seconds:.1f}", ""))
    return lines


def print_table(outcome: Outcome, stream: TextIO) -> None:
    """The table, and a last line that says whether all is well."""
    lines = rows(outcome)
    if stream.isatty() and has_rich():
        from rich.console import Console
        from rich.table import Table

        table = Table("", "through the fabric", "for comparison")
        for line in lines:
            table.add_row(*line)
        Console(file=stream).print(table)
    else:
        widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
        for label, value, beside in lines:
            print(f"{label:<{widths[0]}}  {value:<{widths[1]}}  {beside}".rstrip(), file=stream)
    for problem in outcome.problems:
        print(f"FAILED: {problem}", file=stream)
    if outcome.ok:
        print("OK: every averaged gradient and the final weights are within their bounds", file=stream)
