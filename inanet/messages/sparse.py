"""What machines of a sparse job have: how often its keys were updated, from which it follows which are hot; and its model."""

from typing import Annotated, Literal

from pydantic import Field

from inanet.messages.fields import Count, Frozen, JobId, RoundNumber, TallyData


class Gather(Frozen):
    """To the switch, when all shards have counted: how often were hot keys updated in the iterations up to this one? Answered by
    :class:`Gathered`.
    """

    kind: Literal["gather"] = "gather"
    job: JobId
    #: from 1, as those of tallies
    iteration: Annotated[RoundNumber, Field(ge=1)]


class Gathered(Frozen):
    """What a switch or a shard has counted. A shard says it by itself, and again until a plan says what has been decided."""

    kind: Literal["gathered"] = "gathered"
    job: JobId
    tally: TallyData


class Kept(Frozen):
    """A shard says after how many iterations its part of a job's model is, 0 if there is none, and a number of the job that began
    it. Again until a plan says with which iteration the job begins.
    """

    kind: Literal["kept"] = "kept"
    job: JobId
    iteration: RoundNumber
    origin: Count = 0
