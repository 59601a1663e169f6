"""Why a node does not take part in a job, or has no place for a tensor.

A refusal is an answer and no failure: the node goes on to serve its other jobs, and the coordinator hears the cause and the
sentence (:class:`inanet.messages.control.LayoutReady`).
"""

from typing import ClassVar, Literal


class Refusal(Exception):
    """The sentence says who refuses what, why, and what to do; ``cause`` is the coordinator's word for it."""

    cause: ClassVar[Literal["unsupported", "memory"]] = "unsupported"


class NoRoom(Refusal):
    """What is asked for does not fit beside what there is already."""

    cause = "memory"
