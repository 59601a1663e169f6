"""A sparse job whose model is kept by its servers: it begins with what all of them have.

Shards write down what an iteration has changed before anybody is told that it is finished, so they may have ended one iteration
apart: then the job begins with the earlier one. Workers get no plan before that is known.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inanet.control.collectives import JobLost
from inanet.control.identifying import Identifying
from inanet.control.messages import Kept
from inanet.control.sentences import listing

#: what shards are waited for with, as with tensors
_MODEL = 0


class Keeping(Identifying):
    """What :class:`~inanet.control.job.Job` is built on, beside its hot keys. Other jobs have no model."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: by the shards' names
        self._kept: dict[str, Kept] = {}
        facts = self.planner.switched
        if facts is not None and facts.sparse is not None and facts.sparse.model:
            self._gate = {(name, _MODEL) for name in self._shards}

    def _on_kept(self, name: str, message: Kept) -> None:
        """A shard says what it has."""
        facts = self.planner.switched
        if name not in self._shards or facts is None or facts.sparse is None or facts.begin >= 0:
            return
        self._kept[name] = message
        self._gate.discard((name, _MODEL))
        if len(self._kept) < len(self._shards):
            return
        iterations = {name: kept.iteration for name, kept in self._kept.items()}
        begin, model = min(iterations.values()), facts.sparse.model
        if max(iterations.values()) > begin + 1:
            raise self._mixed(model, "are of iterations that do not belong together", iterations)
        origins = {name: f"{kept.origin:x}" for name, kept in self._kept.items()}
        if begin and len(set(origins.values())) > 1:
            # without an iteration that all have, it is new
            raise self._mixed(model, "were not begun by the same job", origins)
        self.planner.switched = replace(facts, begin=begin)
        self._advance(f"model {model!r} is that of iteration {begin}" if begin else f"model {model!r} is new")

    def _mixed(self, model: str, how: str, parts: Mapping[str, int | str]) -> JobLost:
        """Parts of a model that are not of one: who has what."""
        listed = listing([f"{what} at {name!r}" for name, what in sorted(parts.items())])
        return JobLost(
            "unsupported",
            f"job {self.name!r}: the servers' parts of model {model!r} {how}: {listed}; use the servers that have trained it, under "
            "their names, or another name for the model",
        )
