"""The PS shards of a sparse job in one process, with their state files."""

from pathlib import Path

from inanet.proto.zebra.job import Job
from inanet.proto.zebra.journal import BadState
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import Initial, Optimiser
from inanet.proto.zebra.stream import Timing
from inanet.service.shard_state import StateFile


class Shards:
    """Makes PS shards, each with its state file in ``folder`` if there is one, and makes them again."""

    def __init__(
        self, job: Job, optimiser: Optimiser, initial: Initial, timing: Timing, folder: Path | None
    ) -> None:
        self._of = job, optimiser, initial, timing
        self._files: dict[int, StateFile] = {}
        self._paths: list[Path] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._paths = [folder / f"shard{number}.state" for number in range(len(job.shards))]
        self._made = 0

    def first(self) -> list[ParameterShard]:
        """All shards, with the model that is in the folder. Raises :class:`~inanet.proto.zebra.journal.BadState` and ``OSError``."""
        last = []
        for number, path in enumerate(self._paths):
            file = self._files[number] = StateFile(path)
            last.append(max((entry.iteration for entry in file.entries()), default=0))
            file.keep()
        if last and max(last) > min(last) + 1:
            raise BadState(
                f"{self._paths[0].parent}: the shards' parts are of the models after iterations {', '.join(map(str, last))}, which "
                "do not belong together; put the right files there, or none"
            )
        common = min(last) if last else None
        return [self._make(number, common, anew=True) for number in range(len(self._of[0].shards))]

    def _make(self, number: int, iteration: int | None, *, anew: bool) -> ParameterShard:
        job, optimiser, initial, timing = self._of
        self._made += 1
        life, file = self._made & 0xFFFF, self._files.get(number)
        shard = ParameterShard(job, number, optimiser, initial, timing, life=life, journal=file)
        shard.restore(file.entries() if file is not None else (), anew=anew, iteration=iteration)
        return shard

    def again(self, number: int) -> ParameterShard:
        """A shard whose process is gone, without having been asked. Raises as :meth:`first`."""
        if number in self._files:
            self._files.pop(number).close()
            self._files[number] = StateFile(self._paths[number])
        return self._make(number, None, anew=False)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
