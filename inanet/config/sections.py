"""Sections that configuration files of all daemons have."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from inanet.config.fields import Duration, Probability, ServiceAddress


class Section(BaseModel):
    """Base of all sections: exact types, no unknown keys, immutable once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class Log(Section):
    """``[log]``. ``auto`` is JSON lines under systemd, colours on a terminal, key=value lines otherwise."""

    #: the least that is logged; a reload applies a change
    level: Literal["debug", "info", "warning", "error"] = "info"
    #: ``auto``: the journal's own fields under systemd, colours on a terminal, key=value lines otherwise
    format: Literal["auto", "pretty", "json", "plain"] = "auto"


class Metrics(Section):
    """``[metrics]``: a Prometheus endpoint over HTTP, off unless an address is given."""

    #: where ``/metrics`` is served over HTTP; not set: nowhere
    listen: ServiceAddress | None = None


class Impair(Section):
    """``[impair]``: faults put on every packet that arrives, for tests. Repeatable for a seed; off by
    default.
    """

    #: the same faults for the same seed
    seed: int = Field(default=0, ge=0)
    #: packets that are lost
    drop: Probability = 0.0
    #: packets that come twice
    duplicate: Probability = 0.0
    #: packets that the next ones overtake
    reorder: Probability = 0.0
    #: packets with a flipped bit
    corrupt: Probability = 0.0
    #: by which every packet comes later
    delay: Duration = 0.0

    @property
    def active(self) -> bool:
        """Whether any fault is on."""
        return any((self.drop, self.duplicate, self.reorder, self.corrupt, self.delay))
