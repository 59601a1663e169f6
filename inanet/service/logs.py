"""Structured logs on stderr: JSON lines for the journal, colours for a terminal, key=value lines for anything
else.

Every event has the same leading keys in the same order; the rest follow as given. Events are fixed texts and
facts are keys, so that logs can be searched. A flood of one kind of event is cut short and the number left
out is reported.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from inanet.service.journal import PRIORITIES, is_journal

Format = Literal["auto", "pretty", "json", "plain"]

#: Order of the keys that have a fixed meaning.
FIXED_KEYS = ("timestamp", "level", "event", "role", "node", "job", "rank", "peer", "slot", "seq", "reason")
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

#: This many events of one kind pass per :data:`RATE_SECONDS`.
RATE_BURST = 20
RATE_SECONDS = 5.0
#: Kinds of events remembered; a caller with ever-changing texts must not make the table grow.
RATE_KINDS = 1024


class LevelFilter:
    """Drops events below ``level``, which may be changed while the process runs (SIGHUP)."""

    def __init__(self, level: str) -> None:
        self.level = level

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        """structlog's processor interface."""
        if LEVELS.get(event["level"], 0) < LEVELS[self.level]:
            raise structlog.DropEvent
        return event


class RateLimiter:
    """Lets :data:`RATE_BURST` events per (event, reason) pass in :data:`RATE_SECONDS`.

    The first event of that kind after a cut carries ``suppressed``, the number left out. Critical events
    always pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: by kind: start of its period, events seen in it
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        """structlog's processor interface."""
        if event["level"] == "critical":
            return event
        now = self._clock()
        kind = (str(event.get("event")), str(event.get("reason", "")))
        start, count = self._seen.get(kind, (now, 0))
        if now - start >= RATE_SECONDS:
            if count > RATE_BURST:
                event["suppressed"] = count - RATE_BURST
            start, count = now, 0
        if kind not in self._seen and len(self._seen) >= RATE_KINDS:
            self._seen.clear()
        self._seen[kind] = (start, count + 1)
        if count >= RATE_BURST:
            raise structlog.DropEvent
        return event


def in_order(logger: Any, method: str, event: EventDict) -> EventDict:
    """The fixed keys first. structlog's processor interface."""
    first = {key: event.pop(key) for key in FIXED_KEYS if key in event}
    return {**first, **event}


class SdPrefix:
    """Renders with another processor and puts ``<N>`` before the line, from which the journal takes the
    priority.
    """

    def __init__(self, renderer: Processor) -> None:
        self._renderer = renderer

    def __call__(self, logger: Any, method: str, event: EventDict) -> str:
        """structlog's processor interface."""
        priority = PRIORITIES.get(event["level"], 6)
        return f"<{priority}>{self._renderer(logger, method, event)!s}"


_LOGFMT = structlog.processors.LogfmtRenderer(bool_as_flag=False)


def plain(logger: Any, method: str, event: EventDict) -> str:
    """``key=value`` on one line, a traceback below it as it is. structlog's processor interface."""
    traceback = event.pop("exception", None)
    line = _LOGFMT(logger, method, event)
    return f"{line}\n{traceback}" if traceback else line


def _plain_value(value: Any) -> Any:
    """numpy scalars and other foreign values, for JSON."""
    item = getattr(value, "item", None)
    return item() if callable(item) else repr(value)


def _renderer(format: Format, stream: TextIO, environ: Mapping[str, str]) -> list[Processor]:
    """The last processors of the chain, from the format asked for and what ``stream`` is."""
    journal = is_journal(stream, environ)
    if format == "auto":
        format = "json" if journal else "pretty" if stream.isatty() else "plain"
    if format == "pretty":
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), sort_keys=False)]
    chain: list[Processor] = [structlog.processors.format_exc_info, in_order]
    if format == "json":
        json: Processor = structlog.processors.JSONRenderer(default=_plain_value, ensure_ascii=False)
        return [*chain, SdPrefix(json) if journal else json]
    return [*chain, SdPrefix(plain) if journal else plain]


class _ToStructlog(logging.Handler):
    """Takes what libraries log through the standard library (asyncio's unhandled errors, mainly)."""

    def emit(self, record: logging.LogRecord) -> None:
        """logging's interface."""
        level = record.levelname.lower()
        log = structlog.get_logger()
        getattr(log, level if level in LEVELS else "info")(
            record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )


def configure(
    level: str,
    format: Format = "auto",
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> LevelFilter:
    """Send all logs of this process to ``stream`` (default: stderr). Returns the filter whose ``level`` may
    be changed.

    Loggers come from ``structlog.get_logger()``; ``bind`` them with the fixed keys they know (role, node,
    job, ...).
    """
    stream = sys.stderr if stream is None else stream
    environ = os.environ if environ is None else environ
    threshold = LevelFilter(level)
    chain: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        threshold,
        RateLimiter(clock),
    ]
    if not is_journal(stream, environ):
        # the journal has its own time stamps
        chain.append(structlog.processors.TimeStamper(fmt="iso", utc=True))
    structlog.configure(
        processors=[*chain, *_renderer(format, stream, environ)],
        wrapper_class=structlog.BoundLogger,
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [known for known in root.handlers if isinstance(known, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(logging.WARNING))
    return threshold
