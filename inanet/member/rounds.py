"""Rounds that a worker host has begun and that are not over, as this host sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from inanet.member.identity import Failed, Identity
from inanet.member.job_views import JobViews
from inanet.messages.control import Begin, Message, Refuse
from inanet.proto.common import events
from inanet.proto.common.machine import Follower
from inanet.proto.common.plan import TensorSpec

#: Called once when a round is over, with None for success.
Done = Callable[[Failed | None], None]


@dataclass(slots=True)
class _Opened:
    """A round this host has begun: its tensor, its arrays, and whether the node has it already.

    ``refusal``: why this host cannot take part. It is kept until the round has failed, because a coordinator that
    starts again has not heard of it.
    """

    spec: TensorSpec
    arrays: Sequence[NDArray[Any]]
    tensor: int | None = None
    refusal: Refuse | None = None
    done: Done = lambda _error: None


class HostRounds:
    """Announces rounds in ``out`` and hands them to ``node`` once their tensors are laid out."""

    def __init__(
        self,
        node: Follower,
        identity: Identity,
        following: JobViews,
        out: list[Message],
    ) -> None:
        self._node = node
        self._identity = identity
        self._following = following
        self._out = out
        self._opened: dict[int, _Opened] = {}
        self._held: dict[int, _Opened] = {}
        self._hold_before: int | None = None
        #: the number that :meth:`begin` expects
        self.next = 1
        #: the worker's job: its number once welcomed
        self.job: int | None = None

    def __len__(self) -> int:
        return len(self._opened)

    # ------------------------------------------------------------ beginning

    def begin(
        self, round_: int, spec: TensorSpec, arrays: Sequence[NDArray[Any]], now: float, done: Done
    ) -> None:
        """This host's part in a round."""
        if self._enter(round_, _Opened(spec, arrays, done=done)):
            self._start(round_, self._opened[round_], now)

    def _enter(self, round_: int, opened: _Opened) -> bool:
        """Note a round; False if it has to wait for the end of a :class:`~inanet.messages.control.Hold`."""
        if round_ != self.next:
            raise ValueError(f"round {round_} does not follow round {self.next - 1}")
        self.next += 1
        self._opened[round_] = opened
        if self._hold_before is not None and round_ >= self._hold_before:
            self._held[round_] = opened
            return False
        return True

    def _start(self, round_: int, opened: _Opened, now: float) -> None:
        # also one that has failed while it was held: the coordinator waits for all to come past it
        assert self.job is not None
        if opened.refusal is not None:
            self._out.append(opened.refusal)
            return
        self._out.append(Begin(job=self.job, round=round_, spec=opened.spec))
        if round_ in self._opened:
            self._give(round_, opened, now)

    def _give(self, round_: int, opened: _Opened, now: float) -> None:
        """Hand a round to the node once its tensor has a layout."""
        assert self.job is not None
        layout = self._following.layout_of(self.job, opened.spec)
        if layout is not None and opened.tensor is None and opened.refusal is None:
            opened.tensor = layout.tensor
            self._node.begin(self.job, layout.tensor, round_, opened.arrays, now)

    def hold(self, before: int) -> None:
        """Begin no round from this one on, until :meth:`release`."""
        self._hold_before = before

    def release(self, now: float) -> None:
        """Begin those that were held."""
        self._hold_before = None
        held, self._held = self._held, {}
        for round_, opened in held.items():
            self._start(round_, opened, now)

    # ------------------------------------------------------------ refusing

    def refuse(self, event: events.Refused) -> None:
        """The node has found a number in a round that cannot be summed."""
        opened = self._opened.get(event.round)
        if opened is None:
            return
        value = opened.arrays[event.local_rank][event.index]
        opened.refusal = Refuse(
            job=event.job,
            round=event.round,
            rank=self._identity.ranks[event.local_rank],
            tensor=_name(opened.spec),
            index=event.index,
            reason="nonfinite",
            detail=str(value),
        )
        self._out.append(opened.refusal)

    def refuse_mismatch(self, round_: int, spec: TensorSpec, rank: int, text: str, done: Done) -> None:
        """Ranks of this host called different collectives in a round, which therefore gets no part of this host."""
        assert self.job is not None
        refusal = Refuse(
            job=self.job,
            round=round_,
            rank=rank,
            tensor=_name(spec),
            index=None,
            reason="mismatch",
            detail=text,
        )
        if self._enter(round_, _Opened(spec, (), refusal=refusal, done=done)):
            self._out.append(refusal)

    # ------------------------------------------------------------ what becomes of them

    def repeat(self) -> None:
        """Say to a coordinator that has not heard of them what was begun and refused."""
        assert self.job is not None
        self._out += [Begin(job=self.job, round=number, spec=o.spec) for number, o in self._opened.items()]
        self._out += [o.refusal for o in self._opened.values() if o.refusal is not None]

    def laid_out(self, spec: TensorSpec, now: float) -> None:
        """The node has a tensor now: it gets the rounds that have waited for it."""
        for round_, opened in list(self._opened.items()):
            if opened.spec == spec and round_ not in self._held:
                self._give(round_, opened, now)

    def taken_back(self, tensor: int | None = None) -> None:
        """The node has forgotten a tensor, or the whole job: rounds of it go there again with the layouts that follow."""
        for opened in self._opened.values():
            if tensor is None or opened.tensor == tensor:
                opened.tensor = None

    def close(self, round_: int, error: Failed | None) -> None:
        """A round is over."""
        opened = self._opened.pop(round_, None)
        if opened is not None:
            opened.done(error)

    def close_all(self, error: Failed) -> None:
        """None of them can end any more."""
        for round_ in list(self._opened):
            self.close(round_, error)


def _name(spec: TensorSpec) -> str:
    """What a tensor is called in messages for people."""
    return spec.name or f"{spec.dtype}{list(spec.shape)}"
