"""What a switch, and the parameter server beside it, offer to jobs on switches; part of their :class:`Hello`."""

from typing import Annotated

from pydantic import Field, Strict

from inanet.messages.fields import Count, Frozen, Integer

#: rings of a job
MOST_RINGS = 32


class Service(Frozen):
    """Where packets of a system go (``endpoint``), and what a job can have there: ``slots`` in all, of which it gets its
    ``own`` or which jobs share, ``quota`` of them at a time (0: no limit), and ``values`` in a packet (0: what the
    system's packets always have). ``relays``: answers of a PS come to workers from the switch, as all its packets do. A
    parameter server has no slots; ``keeps``: it can keep models of sparse jobs. ``rings`` is how many a job of NetReduce may have,
    one for each rank of a host.
    """

    endpoint: Annotated[Integer, Field(ge=0, lt=1 << 48)]
    slots: Annotated[Integer, Field(ge=0, le=1 << 20)] = 0
    own: Annotated[bool, Strict()] = False
    quota: Count = 0
    relays: Annotated[bool, Strict()] = False
    values: Annotated[Integer, Field(ge=0, le=1 << 10)] = 0
    rings: Annotated[Integer, Field(ge=1, le=MOST_RINGS)] = 1
    keeps: Annotated[bool, Strict()] = False
