"""Works of the process group: what becomes of those that nobody waits for, and what futures and errors say."""

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import torch

from inanet.torch.completion import Completer
from inanet.torch.ledger import Entry
from inanet.torch.work import FabricReduction, GlooOperation, GroupWork, Unwaited


class Running:
    """An operation that is done when it is told."""

    def __init__(self) -> None:
        self.complete = self.forgotten = False

    def wait(self, seconds: float | None) -> None:
        self.complete = True

    def done(self) -> bool:
        return self.complete

    def error(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def source_rank(self) -> int:
        return 0

    def future(self) -> Any:
        raise NotImplementedError

    def forget(self) -> None:
        self.forgotten = True


class Sent:
    """A reduction whose tensor is wrong, as the agent says."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def finish(self, seconds: float | None = None) -> None:
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        pass


class Gloo:
    """A complete work of Gloo's, whose tensors are dense copies."""

    def __init__(self, copies: list[torch.Tensor]) -> None:
        self._copies = copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._copies

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._copies)
        return future


@pytest.fixture
def completer() -> Any:
    one = Completer("test")
    yield one
    one.close()


def reduced(completer: Completer, tensor: torch.Tensor, error: Exception | None = None) -> FabricReduction:
    return FabricReduction([Sent(error)], [tensor], completer, Entry())  # type: ignore[list-item]


class TestDroppedWorks:
    def test_one_that_never_completes_holds_up_no_other(self) -> None:
        unwaited = Unwaited()
        never, soon = Running(), Running()
        for operation in (never, soon):
            GroupWork(operation, unwaited)
        soon.complete = True
        unwaited.sweep()
        assert soon.forgotten
        assert not never.forgotten

    def test_those_waited_for_are_not_kept(self) -> None:
        unwaited = Unwaited()
        operation = Running()
        GroupWork(operation, unwaited).wait()
        unwaited.sweep()
        assert not operation.forgotten

    def test_small_results_stay_for_whoever_has_them_in_cpp(self, completer: Completer) -> None:
        """DDP's join waits for its one element after other collectives have come, and takes it from the future."""
        operation = reduced(completer, torch.ones(1))
        operation.forget()
        operation.wait(None)
        assert operation.future().wait()[0].item() == 1.0
        gloo = GlooOperation(Gloo([torch.ones(1)]), lambda error: error, completer, Entry(), [torch.ones(1)])
        gloo.forget()
        gloo.wait(None)
        assert gloo.future().wait()[0].item() == 1.0

    def test_large_ones_go_and_a_future_says_so(self, completer: Completer) -> None:
        operation = reduced(completer, torch.ones(10_000))
        operation.forget()
        operation.wait(None)
        with pytest.raises(RuntimeError, match="nobody has waited for this collective"):
            operation.future().wait()

    def test_errors_stay(self, completer: Completer) -> None:
        operation = reduced(completer, torch.ones(1), ValueError("what was wrong"))
        assert operation.done()
        operation.forget()
        with pytest.raises(ValueError, match="what was wrong"):
            operation.wait(None)


def test_whoever_asks_for_errors_is_told_any(completer: Completer) -> None:
    operation = reduced(completer, torch.ones(1), TypeError("not for the fabric"))
    assert operation.done()
    assert isinstance(operation.error(), TypeError)


def test_futures_hold_the_callers_tensors_when_what_remained_is_done(completer: Completer) -> None:
    mean, copy = torch.zeros(2), torch.full((2,), 6.0)

    def finish() -> None:
        mean.copy_(copy)
        mean.div_(3)

    work = GlooOperation(Gloo([copy]), lambda error: error, completer, Entry(), [mean], finish, [mean])
    assert work.future().wait()[0].tolist() == [2.0, 2.0]
    assert work.result()[0] is mean
