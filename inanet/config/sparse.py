"""A sparse job's file: what all processes of the job agree on. Every one of them reads the same file.

With ``[control]`` a coordinator says where the machines are (:class:`FabricSparseConfig`); without it the file does.
"""

import os
from typing import Annotated, Literal

from pydantic import Field, field_validator

from inanet.config.control import ClientControl
from inanet.config.fields import AbsolutePath, Bytes, DataAddress, Name, Rate, between
from inanet.config.sections import Impair, Section
from inanet.config.switch import Member, Members
from inanet.proto.zebra.plan import MAX_SHARDS, MODEL
from inanet.service.addresses import HostPort
from inanet.wire.xagg import MAX_CHILDREN


class KeyOptions(Section):
    """How keys are kept and changed, and which of them are hot."""

    #: values of a key
    width: Annotated[int, Field(ge=1, le=255)] = 1
    sharding: Literal["hash", "range"] = "hash"
    optimiser: Literal["sum", "sgd", "adagrad", "ftrl"] = "sum"
    #: the optimiser's; not for sum
    rate: Annotated[float, Field(gt=0)] = 0.1
    #: ftrl's
    beta: Annotated[float, Field(ge=0)] = 1.0
    #: first values are within this bound of zero, each key's own
    initial: Annotated[float, Field(ge=0)] = 0.0
    #: hot keys, one to a line, hottest first, as 'ina zebra hot -o' writes them
    hot: AbsolutePath | None = None
    #: gradients of hot keys are in steps of 2^-shift
    shift: Annotated[int, Field(ge=-64, le=64)] = 20
    registers: Annotated[int, Field(ge=1, le=1 << 16)] = 32
    hot_pairs: Annotated[int, Field(ge=1)] = 20

    def hot_keys(self) -> list[int] | None:
        """The hot keys, if there is a file of them. Raises ``OSError`` for a file that cannot be read, ``ValueError`` naming the line
        that is no key.
        """
        if self.hot is None:
            return None
        keys = []
        with open(self.hot, encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                text = line.strip()
                digits = text.isascii() and text.isdigit() and len(text) <= 20
                if text and not (digits and int(text) < 1 << 64):
                    raise ValueError(
                        f"{self.hot} has something else than keys, one to a line: line {number} is {text[:40]!r}, not an integer "
                        "from 0 to 2^64 - 1"
                    )
                if text:
                    keys.append(int(text))
        return keys


class SparseSection(KeyOptions):
    """``[job]``: addresses of all machines, how keys are kept and changed, and which of them are hot.

    Whoever knows ``secret`` can take part: keep the file from others.
    """

    number: Annotated[int, Field(ge=0, le=0xFFFF)] = 1
    secret: str = Field(description="16 hexadecimal digits, e.g. of 'openssl rand -hex 8'")
    workers: Members = Field(description="the workers' endpoints by rank, e.g. ['10.0.0.1:4000']")
    shards: Members = Field(description="the PS shards' endpoints by number, e.g. ['10.0.0.9:5000']")
    #: not set: the PS shards do everything
    switch: Member | None = None
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
    impair: Impair = Field(default_factory=Impair)


class OnlineSection(Section):
    """``[job.online]``: find hot keys while the job trains, see :class:`~inanet.proto.common.plan.Online`."""

    #: iterations
    after: Annotated[int, Field(ge=1, le=1 << 20)] = 10
    #: other keys are hot when their list is further than this from the one in use: Kendall tau distance of top-k lists
    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.1
    #: what weight earlier counts keep
    fading: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: hot values take this share of so many bytes of the switch at most
    c: Annotated[float, Field(gt=0, lt=1)] = 0.25
    memory: Annotated[Bytes, between(1, 1 << 30)] = 1 << 20
    #: so many more keys are hot as long as they add a hundredth of all updates
    step: Annotated[int, Field(ge=1, le=1 << 16)] = 1000


class FabricJob(KeyOptions):
    """``[job]`` of a job whose machines a coordinator names."""

    system: Literal["zebra"] = "zebra"
    name: Name = Field(description="the job's name, e.g. 'clicks'")
    #: ranks
    world: Annotated[int, Field(ge=1, le=MAX_CHILDREN)] = Field(
        description="how many ranks the job has, e.g. 4"
    )
    #: parameter servers that keep the keys
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    #: servers keep the values under this name, and the job begins with those that they have
    model: Annotated[str, Field(pattern=f"^{MODEL.pattern}$")] | None = None
    #: not set: hot keys are the file's as long as the job runs
    online: OnlineSection | None = None


class RankNode(Section):
    """``[node]``: a rank as a node of the fabric; its name there is ``name``, a hyphen, and the rank."""

    name: Name = Field(default_factory=lambda: os.uname().nodename, description="the host's name")
    #: where the rank receives: an address or an interface that the other machines reach
    listen: DataAddress = HostPort("127.0.0.1", 0)


class FabricSparseConfig(Section):
    """The file of a job whose machines are daemons: every rank asks the coordinator of ``[control]`` for them."""

    job: FabricJob = Field(description="the section with the job's name and its ranks")
    control: ClientControl = Field(description="the section with the coordinator's address")
    node: RankNode = Field(default_factory=RankNode)
    impair: Impair = Field(default_factory=Impair)
