"""Epochs: every job that is admitted gets a higher number than all before it, also those before a restart."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from inanet.service.exits import Failure

SCHEMA = 1


class Epochs:
    """Numbers from 1 on, or from where ``file`` left off. A number is on disk before anybody hears of it; where that cannot be
    (no space, a disk that fails), ``tell(reason)`` is called, and numbers go on in memory: jobs have random keys, so that no two
    runs of a coordinator are taken for one, and a coordinator that serves no job is worse.
    """

    def __init__(self, file: str | None, tell: Callable[[str], None] = lambda reason: None) -> None:
        """Raises :class:`Failure` if the file is there and is not one of these."""
        self._file = Path(file) if file is not None else None
        self._tell = tell
        self.last = self._read()

    def _read(self) -> int:
        if self._file is None or not self._file.exists():
            return 0
        try:
            data = json.loads(self._file.read_text("utf-8"))
            if data["schema"] == SCHEMA and type(data["epoch"]) is int and data["epoch"] >= 0:
                return int(data["epoch"])
        except (ValueError, KeyError, TypeError):
            pass
        raise Failure(f"{self._file} holds no epoch: move it away to begin at 1 again, if no old job is left")

    def next(self) -> int:
        """The next number."""
        self.last += 1
        if self._file is not None:
            fresh = self._file.with_name(f"{self._file.name}.new")
            try:
                with fresh.open("w", encoding="utf-8") as target:
                    json.dump({"schema": SCHEMA, "epoch": self.last}, target)
                    target.flush()
                    os.fsync(target.fileno())
                fresh.replace(self._file)
            except OSError as error:
                with contextlib.suppress(OSError):
                    fresh.unlink()
                self._tell(f"{self._file}: {error.strerror or error}")
        return self.last
