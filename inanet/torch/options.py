"""How torch uses the fabric: what a user may say, and what the environment says otherwise."""

import os
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite

#: environment: "1" is ``require_ina=True`` for scripts that cannot be changed
REQUIRE_VARIABLE = "INA_REQUIRE"
#: environment: a directory into which every rank writes its trace
TRACE_VARIABLE = "INA_TRACE"
#: what torchrun calls the run
RUN_VARIABLE = "TORCHELASTIC_RUN_ID"
#: seconds that all ranks have to join, whatever rounds may take
MOST_JOIN_SECONDS = 60.0
_NAME_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a hook or a process group: ``init_process_group("ina", pg_options=Options(...))``.

    ``job``: what the job's name begins with (default: torchrun's run id). ``socket``: the agent of this host
    (default: INA_SOCKET, then the usual places). ``timeout``: seconds a round may take (default: the process
    group's). ``mode`` and ``factor``: how exponents are agreed, as in
    :meth:`inanet.client.job.Job.all_reduce_async`. ``nan``: "propagate" lets NaN and infinity through as
    torch does; finite neighbours in their block of 8 elements come as 0 (256 with carried and fixed exponents). "refuse" raises
    :class:`~inanet.errors.NonFiniteError` on all ranks. ``require_ina``: raise instead of falling
    back to the process group's own all-reduce (default: INA_REQUIRE). ``measure``: compare with that
    all-reduce at the start and take the faster; without effect if INA is required. ``trace``: directory
    for traces of a hook (default: INA_TRACE).

    Raises ``ValueError`` for values that make no sense.
    """

    job: str = ""
    socket: str | os.PathLike[str] | None = None
    timeout: float | None = None
    mode: str = "prologue"
    factor: float = 1e8
    nan: str = "propagate"
    require_ina: bool | None = None
    measure: bool = True
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("carried", "prologue", "fixed"):
            raise ValueError(f"mode {self.mode!r} is none of carried, prologue, fixed")
        if self.nan not in ("propagate", "refuse"):
            raise ValueError(f"nan {self.nan!r} is neither propagate nor refuse")
        for name, value in (("timeout", self.timeout), ("factor", self.factor)):
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, not {value!r}")
        if len(self.job) > _NAME_LENGTH or not self.job.isprintable():
            raise ValueError(f"job must have at most {_NAME_LENGTH} printable characters")

    @property
    def required(self) -> bool:
        """Whether falling back to another all-reduce is an error."""
        if self.require_ina is not None:
            return self.require_ina
        return os.environ.get(REQUIRE_VARIABLE, "0") not in ("", "0")

    @property
    def name(self) -> str:
        """What the job's name begins with: printable, at most 64 characters."""
        text = self.job or os.environ.get(RUN_VARIABLE, "")
        text = "".join(letter for letter in text if letter.isprintable())[:_NAME_LENGTH]
        # without --rdzv-id torchrun says "none"
        return text if text and text != "none" else "torch"

    @property
    def trace_directory(self) -> str | None:
        """Where traces go, if anywhere."""
        if self.trace is not None:
            return os.fspath(self.trace)
        return os.environ.get(TRACE_VARIABLE) or None

    def seconds(self, default: timedelta) -> float:
        """What a round may take; ``default`` is the process group's timeout."""
        return default.total_seconds() if self.timeout is None else self.timeout
