"""What hosts may send: :mod:`inanet.planning.negotiation`."""

from typing import Literal

from inanet.messages.fields import (
    Count,
    Frozen,
    JobId,
)


class RateReady(Frozen):
    """This host has a gradient to send, and can send ``maximum`` bits per second (0: its link has no limit).

    Of all messages about rates the one with the highest ``sequence`` counts.
    """

    kind: Literal["rate_ready"] = "rate_ready"
    job: JobId
    sequence: Count
    maximum: Count = 0


class RateDone(Frozen):
    """This host has sent everything that its parents lacked."""

    kind: Literal["rate_done"] = "rate_done"
    job: JobId
    sequence: Count


class RateLoss(Frozen):
    """Fragments that this host has ``sent`` in a period, and how many of them it had ``lost`` and sent again."""

    kind: Literal["rate_loss"] = "rate_loss"
    job: JobId
    sequence: Count
    sent: Count
    lost: Count


class RateGrant(Frozen):
    """What this node may send for a job from now on, in bits per second as on the wire: ``up`` to its parents, ``down``
    to its children; None: no limit. Of several the one with the highest ``sequence`` counts.
    """

    kind: Literal["rate_grant"] = "rate_grant"
    job: JobId
    sequence: Count
    up: Count | None
    down: Count | None
