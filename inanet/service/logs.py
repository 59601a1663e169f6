"""Structured logs on stderr: entries with fields for the journal, colours for a terminal, key=value lines for anything
else.

Every event has the same leading keys in the same order; the rest follow as given. Events are fixed texts and
facts are keys, so that logs can be searched. A flood of one kind of event is cut short and the number left
out is reported.
"""

import contextlib
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from inanet.service.journal import PRIORITIES, JournalEntries, is_journal
from inanet.service.log_sink import LogSink

Format = Literal["auto", "pretty", "json", "plain"]

#: Order of the keys that have a fixed meaning.
FIXED_KEYS = ("timestamp", "level", "event", "role", "node", "job", "rank", "peer", "slot", "seq", "reason")
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

#: This many events of one kind pass per :data:`RATE_SECONDS`.
RATE_BURST = 20
RATE_SECONDS = 5.0
#: Kinds of events remembered; a caller with ever-changing texts must not make the table grow.
RATE_KINDS = 1024
#: Addresses named among those that caused most of the events left out.
RATE_SOURCES = 3


class LevelFilter:
    """Drops events below ``level``, which may be changed while the process runs (SIGHUP)."""

    def __init__(self, level: str) -> None:
        self.level = level

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        """structlog's processor interface."""
        if LEVELS.get(event["level"], 0) < LEVELS[self.level]:
            raise structlog.DropEvent
        return event


#: Texts in quotes, and words: of a reason's beginning, which tells its kind.
_WORDS = re.compile(r"""'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z)|[^\s'"]+""")
_BEGINNING = 300


def _kind_of(reason: str) -> str:
    """A reason without what of it whoever caused it may choose: texts in quotes, and words with a digit (ports, lengths, names)."""

    def hide(word: re.Match[str]) -> str:
        text = word.group()
        return "#" if text[0] in "'\"" or any(map(str.isdigit, text)) else text

    return _WORDS.sub(hide, reason[:_BEGINNING])


@dataclass(slots=True)
class _Kind:
    """Events of one kind: since when they are counted, how many there were, and of whom, as far as it was said."""

    start: float
    count: int = 0
    sources: Counter[str] = field(default_factory=Counter)

    @property
    def suppressed(self) -> int:
        return max(0, self.count - RATE_BURST)

    def summary(self) -> dict[str, object]:
        """What a line says that stands for those left out."""
        most = ", ".join(f"{source} ({count})" for source, count in self.sources.most_common(RATE_SOURCES))
        return {"suppressed": self.suppressed, **({"most_from": most} if most else {})}


class RateLimiter:
    """Lets :data:`RATE_BURST` events of a kind pass in :data:`RATE_SECONDS`, and three times as many with the same text.

    A kind is an event and its reason, without what of it a stranger chooses. The first event of that kind after a cut carries
    ``suppressed``, the number left out, and ``most_from``, the addresses that caused most of them; so does :meth:`left_out` if
    none follows. Critical events always pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: by event and reason; those of an event for which there is no room are one kind, with the reason "..."
        self._kinds: dict[tuple[str, str], _Kind] = {}
        #: what has passed, by event
        self._passed: dict[str, _Kind] = {}

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        """structlog's processor interface."""
        if event["level"] == "critical":
            return event
        now = self._clock()
        text = str(event.get("event"))
        passed, kind = self._find(text, _kind_of(str(event.get("reason", ""))), now)
        if now - passed.start >= RATE_SECONDS:
            passed.start, passed.count = now, 0
        if now - kind.start >= RATE_SECONDS:
            if kind.suppressed:
                event.update(kind.summary())
            kind.start, kind.count = now, 0
            kind.sources.clear()
        source = _source(event)
        if source and (source in kind.sources or len(kind.sources) < RATE_KINDS):
            kind.sources[source] += 1
        if kind.count < RATE_BURST and passed.count < 3 * RATE_BURST:
            kind.count += 1
            passed.count += 1
            return event
        # one of many kinds may be left out for the others' sake, and is counted with those that are
        kind.count = max(kind.count, RATE_BURST) + 1
        raise structlog.DropEvent

    def _find(self, text: str, reason: str, now: float) -> tuple[_Kind, _Kind]:
        if text not in self._passed and len(self._passed) >= RATE_KINDS:
            # events are fixed texts: whoever makes so many of them is not worth more
            text = "..."
        passed = self._passed.get(text)
        if passed is None:
            passed = self._passed[text] = _Kind(now)
        key = text, reason
        if key not in self._kinds and len(self._kinds) >= RATE_KINDS:
            self._forget(now)
            if len(self._kinds) >= RATE_KINDS:
                key = text, "..."
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(now)
        return passed, kind

    def _forget(self, now: float) -> None:
        for key, kind in list(self._kinds.items()):
            if now - kind.start >= RATE_SECONDS and not kind.suppressed:
                del self._kinds[key]

    def left_out(self) -> Iterator[dict[str, object]]:
        """For each kind of which events were left out, and none came since their time was over: which, and how many. Of those with
        the same event, the largest, and the others as one.
        """
        now = self._clock()
        over: dict[str, list[tuple[str, _Kind]]] = {}
        for (text, reason), kind in list(self._kinds.items()):
            if now - kind.start >= RATE_SECONDS:
                if kind.suppressed:
                    over.setdefault(text, []).append((reason, kind))
                del self._kinds[text, reason]
        for text, kinds in over.items():
            (reason, most), *others = sorted(kinds, key=lambda one: -one[1].suppressed)
            yield {"of": text, **({"reason": reason} if reason else {}), **most.summary()}
            if others:
                yield {"of": text, "reasons": len(others), "suppressed": sum(k.suppressed for _, k in others)}


def _source(event: EventDict) -> str:
    """The host that has caused an event, without its port; empty if the event does not say."""
    for key in ("address", "peer"):
        value = event.get(key)
        if isinstance(value, str) and value:
            host, _, port = value.rpartition(":")
            return host if host and port.isdigit() else value
    return ""


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


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def _renderer(format: Format, stream: TextIO | None, environ: Mapping[str, str]) -> list[Processor]:
    """The last processors of the chain, from the format asked for and what ``stream`` is."""
    journal = is_journal(stream, environ)
    if format == "auto" and journal:
        return [
            structlog.processors.format_exc_info,
            in_order,
            JournalEntries(),
            SdPrefix(plain),
        ]
    if format == "auto":
        format = "pretty" if _is_terminal(stream) else "plain"
    if format == "pretty":
        return [structlog.dev.ConsoleRenderer(colors=_is_terminal(stream), sort_keys=False)]
    chain: list[Processor] = [structlog.processors.format_exc_info, in_order]
    if format == "json":
        json: Processor = structlog.processors.JSONRenderer(default=_plain_value, ensure_ascii=False)
        return [*chain, SdPrefix(json) if journal else json]
    return [*chain, SdPrefix(plain) if journal else plain]


class Logger(structlog.BoundLoggerBase):
    """What ``structlog.get_logger()`` gives. No call raises: what cannot be rendered is counted with what cannot be written."""

    def _log(self, level: str, event: str, **facts: Any) -> None:
        try:
            self._proxy_to_logger(level, event, **facts)
        except Exception as error:
            self._logger.fail(f"a line cannot be rendered: {type(error).__name__}")

    def debug(self, event: str, **facts: Any) -> None:
        """For who looks for an error in this program."""
        self._log("debug", event, **facts)

    def info(self, event: str, **facts: Any) -> None:
        """What happens in good order."""
        self._log("info", event, **facts)

    def warning(self, event: str, **facts: Any) -> None:
        """What somebody should look at."""
        self._log("warning", event, **facts)

    def error(self, event: str, **facts: Any) -> None:
        """What does not work."""
        self._log("error", event, **facts)

    def critical(self, event: str, **facts: Any) -> None:
        """What ends the process."""
        self._log("critical", event, **facts)

    def exception(self, event: str, **facts: Any) -> None:
        """An error with the exception that is being handled."""
        self._log("error", event, **{"exc_info": True, **facts})


@dataclass(slots=True)
class Logs:
    """The logs of this process: the filter whose ``level`` may be changed, the limit of floods, and where lines go."""

    threshold: LevelFilter
    limiter: RateLimiter
    sink: LogSink

    def look(self) -> None:
        """To be called every few seconds: write what has been kept for a slow reader, and tell what was left out."""
        self.sink.flush()
        log = structlog.get_logger()
        for facts in self.limiter.left_out():
            log.warning("log lines left out", **facts)


class _ToStructlog(logging.Handler):
    """Takes what libraries log through the standard library (asyncio's unhandled errors, mainly)."""

    def emit(self, record: logging.LogRecord) -> None:
        """logging's interface."""
        level = record.levelname.lower()
        with contextlib.suppress(Exception):
            log = structlog.get_logger()
            getattr(log, level if level in LEVELS else "info")(
                record.getMessage(), logger=record.name, exc_info=record.exc_info or None
            )


def _recovered(lines: int, reason: str) -> None:
    structlog.get_logger().warning("log lines were not written", lines=lines, reason=reason)


def configure(
    level: str,
    format: Format = "auto",
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Logs:
    """Send all logs of this process to ``stream`` (default: stderr).

    Loggers come from ``structlog.get_logger()``; ``bind`` them with the fixed keys they know (role, node,
    job, ...).
    """
    stream = sys.stderr if stream is None else stream
    environ = os.environ if environ is None else environ
    logs = Logs(LevelFilter(level), RateLimiter(clock), LogSink(stream, _recovered))
    chain: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        logs.threshold,
        logs.limiter,
    ]
    if not is_journal(stream, environ):
        # the journal has its own time stamps
        chain.append(structlog.processors.TimeStamper(fmt="iso", utc=True))
    structlog.configure(
        processors=[*chain, *_renderer(format, stream, environ)],
        wrapper_class=Logger,
        logger_factory=lambda *_names: logs.sink,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [known for known in root.handlers if isinstance(known, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(logging.WARNING))
    return logs
