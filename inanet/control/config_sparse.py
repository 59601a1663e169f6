"""A sparse job's file: what all processes of the job agree on. Every one of them reads the same file."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from inanet.control.config_fields import AbsolutePath, Bytes, Rate, between
from inanet.control.config_sections import Impair, Section
from inanet.control.config_switch import Member, Members


class SparseSection(Section):
    """``[job]``: addresses of all machines, how keys are kept and changed, and which of them are hot.

    Whoever knows ``secret`` can take part: keep the file from others.
    """

    number: Annotated[int, Field(ge=0, le=0xFFFF)] = 1
    secret: str = Field(description="16 hexadecimal digits, e.g. of 'openssl rand -hex 8'")
    workers: Members = Field(description="the workers' endpoints by rank, e.g. ['10.0.0.1:4000']")
    shards: Members = Field(description="the PS shards' endpoints by number, e.g. ['10.0.0.9:5000']")
    #: not set: the PS shards do everything
    switch: Member | None = None
    #: values of a key
    width: Annotated[int, Field(ge=1, le=255)] = 1
    sharding: Literal["hash", "range"] = "hash"
    optimiser: Literal["sum", "sgd", "adagrad", "ftrl"] = "sum"
    #: the optimiser's; not for sum
    rate: Annotated[float, Field(gt=0)] = 0.1
    #: first values are within this bound of zero, each key's own
    initial: Annotated[float, Field(ge=0)] = 0.0
    #: hot keys, one to a line, hottest first, as 'ina zebra hot -o' writes them
    hot: AbsolutePath | None = None
    #: gradients of hot keys are in steps of 2^-shift
    shift: Annotated[int, Field(ge=-64, le=64)] = 20
    registers: Annotated[int, Field(ge=1)] = 32
    hot_pairs: Annotated[int, Field(ge=1)] = 20
    #: bytes of registers
    memory: Annotated[Bytes, between(1 << 10, 1 << 30)] = 1 << 20
    #: workers and shards send and receive no faster than this
    link: Rate | None = None

    @field_validator("secret")
    @classmethod
    def _key(cls, text: str) -> str:
        if len(text) != 16 or not set(text.lower()) <= set("0123456789abcdef"):
            raise ValueError("is no key; allowed: 16 hexadecimal digits")
        return text

    @field_validator("workers", "shards")
    @classmethod
    def _somebody(cls, members: tuple[Member, ...]) -> tuple[Member, ...]:
        if not members or not all(member.port for member in members):
            raise ValueError(
                "needs one endpoint at least, each with its port; allowed: e.g. ['10.0.0.1:4000']"
            )
        return members


class SparseConfig(Section):
    """The file. ``[impair]`` puts faults on every packet that arrives at any machine, for tests."""

    job: SparseSection = Field(description="the section with the job's machines")
    impair: Impair = Impair()
