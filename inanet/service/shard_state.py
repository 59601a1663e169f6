"""A PS shard's state file: its journal, from which a process that is started in the place of one that ended goes on.

Records (:mod:`inanet.proto.zebra.journal`) are appended, so that an iteration costs what it has changed. When the file has grown
to several times the shard, it is written anew beside the old one and put in its place. A process may be killed at any moment;
after a loss of power the last iterations may be missing, and then the shard says so to everybody who knows of them.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from inanet.proto.zebra.journal import BadState, Entry, part_of, records

#: bytes up to which a file is not written anew, and how many times the shard it may be
_LEAST, _TIMES = 16 << 20, 4


class StateFile:
    """The state file of one shard, held by one process at a time. A :class:`~inanet.proto.zebra.journal.Journal`.

    Raises :class:`~inanet.proto.zebra.journal.BadState` while another process has it, ``OSError`` when it cannot be opened.
    ``least`` bytes are not worth writing it anew.
    """

    def __init__(self, path: str | Path, *, least: int = _LEAST) -> None:
        self.path = Path(path)
        self._least = self._limit = least
        self._file = self._open()
        self._size = os.fstat(self._file).st_size

    def _open(self) -> int:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # another process may have put a new file in its place since, or removed it
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file), os.stat(self.path)):
                        return file
            except BlockingIOError:
                os.close(file)
                raise BadState(f"{self.path} is in use by another process; a shard runs once") from None
            os.close(file)

    def entries(self) -> Iterator[Entry]:
        """What is in it. What was cut off when a process ended was never told of, and is removed. Raises
        :class:`~inanet.proto.zebra.journal.BadState` for damage.
        """
        whole = 0
        data = self.path.read_bytes()
        try:
            for end, entry in records(data):
                whole = end
                yield entry
        except BadState as error:
            raise BadState(
                f"{self.path}: {error}. Take a copy of the file from elsewhere, or cut it to {whole} B to go on from there"
            ) from None
        os.ftruncate(self._file, whole)
        self._size = whole
        self._limit = max(self._limit, whole)

    def append(self, record: bytes) -> bool:
        """Keep a record; whether the file has become long. Raises ``OSError`` when it cannot be written: then it is as before."""
        try:
            self._write(self._file, record, self._size)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(record)
        return self._size > self._limit

    def rewrite(self, records: bytes) -> None:
        """Have these records instead. Raises ``OSError`` when they cannot be written: then the file is as before."""
        beside = self.path.with_name(self.path.name + ".new")
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(file, records, 0)
            os.fsync(file)
            os.replace(beside, self.path)
        except OSError:
            os.close(file)
            # on a full disk it would be in the way of everybody else
            beside.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._size = file, len(records)
        self._limit = max(self._least, _TIMES * self._size)

    def keep(self) -> None:
        """Keep what is in the file now beside it, as ``.before``, when :meth:`rewrite` puts another in its place."""
        before = self.path.with_name(self.path.name + ".before")
        before.unlink(missing_ok=True)
        before.hardlink_to(self.path)

    @staticmethod
    def _write(file: int, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(file, view, at)
            view, at = view[written:], at + written

    def close(self) -> None:
        """Let another process have it. One in which nothing was written is removed: jobs that come to nothing leave none."""
        if self._file >= 0:
            if self._size == 0:
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


class ModelFolder:
    """A server's parts of models, each in a file: see :class:`~inanet.proto.zebra.journal.Models`. Servers may have one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, part: str) -> StateFile:
        """The file of a part. Raises as :class:`StateFile`."""
        return StateFile(self._folder / f"{part}.state")

    def trained(self, model: str) -> list[str]:
        """Parts of a model that have iterations. Raises ``OSError``, and :class:`~inanet.proto.zebra.journal.BadState` for damage."""
        parts = re.compile(rf"{re.escape(model)}\.\d+of\d+\.state")
        found = []
        for file in sorted(file for file in self._folder.iterdir() if parts.fullmatch(file.name)):
            try:
                if part_of(entry for _, entry in records(file.read_bytes())).iteration:
                    found.append(file.stem)
            except BadState as error:
                raise BadState(f"{file}: {error}") from None
        return found
