"""Errors keep what they say on the way from the agent to the process, and when they are raised again."""

import copy
import pickle

import pytest

from inanet.errors import (
    BY_CAUSE,
    AgentUnavailable,
    FabricError,
    InaError,
    MismatchError,
    NonFiniteError,
    cause_of,
    error_of,
)


@pytest.mark.parametrize("cause", [*BY_CAUSE, "memory"])
def test_causes_name_types_and_types_name_causes(cause: str) -> None:
    error = error_of(cause, "why", job="train", rank=3, round=7, ranks=(1, 2))
    assert isinstance(error, BY_CAUSE.get(cause, FabricError))
    assert cause_of(error) == (cause if cause in BY_CAUSE else "fabric")
    assert str(error) == "job 'train', rank 3, round 7: why"
    assert (error.job, error.rank, error.round, error.ranks) == ("train", 3, 7, (1, 2))


def test_details_belong_to_their_type() -> None:
    details = {"tensor": "w", "index": 5, "field": "op", "values": ["sum", "max"]}
    nonfinite = error_of("nonfinite", "why", job="", rank=-1, details=details)
    assert isinstance(nonfinite, NonFiniteError)
    assert nonfinite.details() == {"tensor": "w", "index": 5}
    mismatch = error_of("mismatch", "why", job="", rank=-1, details=details)
    assert isinstance(mismatch, MismatchError)
    assert mismatch.details() == {"field": "op", "values": ("sum", "max")}
    assert error_of("timeout", "why", job="", rank=-1, details=details).details() == {}


def test_messages_say_no_more_than_is_known() -> None:
    assert str(InaError("why")) == "why"
    assert str(InaError("why", rank=0)) == "rank 0: why"
    assert str(InaError("why", job="train")) == "job 'train': why"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("job 'my job', round 7 (tensor 'w'): gone", "job 'my job', rank 0, round 7 (tensor 'w'): gone"),
        ("job 'my job', round 7: gone", "job 'my job', rank 0, round 7: gone"),
        ("job 'my job': the server is gone", "job 'my job', rank 0, round 7: the server is gone"),
        ("job 'my job', round 75: gone", "job 'my job', rank 0, round 7: round 75: gone"),
        ("job 'my job, round 7': gone", "job 'my job', rank 0, round 7: job 'my job, round 7': gone"),
        ("job 'other', round 7: gone", "job 'my job', rank 0, round 7: job 'other', round 7: gone"),
    ],
)
def test_a_coordinators_message_does_not_say_job_and_round_again(message: str, says: str) -> None:
    error = InaError(message, round=7).at(job="my job", rank=0)
    assert str(error) == says
    assert error.reason == message


def test_another_place_keeps_the_rest() -> None:
    error = AgentUnavailable("why", searched=("/run/x.sock",))
    moved = error.at(job="train", rank=2, round=9)
    assert (moved.job, moved.rank, moved.round, moved.searched) == ("train", 2, 9, ("/run/x.sock",))
    assert moved.at(job="train", rank=2, round=11).round == 9


def test_errors_can_be_copied_and_pickled() -> None:
    error = NonFiniteError("why", tensor="w", index=4, job="train", rank=1, round=2, ranks=(3,))
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(other) == str(error)
        assert vars(other) == vars(error)
