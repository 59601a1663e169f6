"""``[control]``: who coordinates, how nodes prove who they are, and how long they wait for each other."""

from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from inanet import units
from inanet.config.fields import (
    COORDINATOR_PORT,
    GROUP_PORT,
    GROUP_RANGE,
    AbsolutePath,
    CoordinatorAddress,
    GroupRange,
    Probability,
    Span,
    check_token,
    read_token,
    span,
)
from inanet.config.sections import Section
from inanet.service.addresses import HostPort
from inanet.trust.certificates import KeyFileError, Keys
from inanet.trust.revocation_list import Revocations


class Control(Section):
    """What both ends of a control connection have. Durations in seconds.

    Checks that involve two keys stand at the later one and see the earlier in ``info.data``, so that they
    are reported together with everything else.
    """

    #: the fabric's secret, 16 characters or more, the same on all nodes
    token: SecretStr | None = None
    #: a file with it instead
    token_file: AbsolutePath | None = None
    #: the authority's certificate: connections are TLS with certificates, instead of or beside a token
    ca_file: AbsolutePath | None = None
    #: this node's certificate and its private key, from 'ina keys issue'
    key_file: AbsolutePath | None = Field(default=None, validate_default=True)
    #: certificates of the authority that are no longer good, as 'ina keys revoke' lists them; read again when it changes
    revoked_file: AbsolutePath | None = None
    #: no TLS beyond this machine: whoever sees the network may read the token and take over jobs
    insecure: Annotated[bool, Field(strict=True)] = False
    #: how often both ends of a connection say that they are there
    heartbeat: Span = span("1 s")
    #: how long to wait for the other nodes of a job before giving up with their names
    join_timeout: Span = span("60 s")
    #: how long a round may take once it began, before every rank gets the same error
    round_timeout: Span = span("30 s")
    #: how long running rounds may go on after SIGTERM
    drain_timeout: Span = span("10 s")

    @field_validator("token")
    @classmethod
    def _long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            check_token(token.get_secret_value())
        return token

    @field_validator("token_file")
    @classmethod
    def _readable(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None:
            if info.data.get("token") is not None:
                raise ValueError("token is set as well; allowed: one of the two")
            check_token(read_token(path))
        return path

    @field_validator("key_file")
    @classmethod
    def _usable(cls, path: str | None, info: ValidationInfo) -> str | None:
        authority = info.data.get("ca_file")
        if path is None and authority is not None:
            raise ValueError("ca_file is set and key_file is not; allowed: both, from 'ina keys', or neither")
        if path is not None and "ca_file" in info.data:
            if authority is None:
                raise ValueError("ca_file is not set; allowed: both, from 'ina keys', or neither")
            try:
                Keys(authority, path).client()
            except KeyFileError as error:
                raise ValueError(f"{error}; allowed: files made by 'ina keys'") from None
        return path

    @field_validator("revoked_file")
    @classmethod
    def _listed(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None:
            if info.data.get("key_file", "") is None:
                raise ValueError(
                    "there are no certificates without ca_file and key_file; allowed: all three, or leave it out"
                )
            try:
                Revocations(path)
            except (OSError, ValueError) as error:
                what = error.strerror if isinstance(error, OSError) else str(error)
                raise ValueError(
                    f"cannot read {path}: {what}; allowed: a list of 'ina keys revoke', empty if nothing was revoked"
                ) from None
        return path

    @field_validator("insecure")
    @classmethod
    def _one_way(cls, insecure: bool, info: ValidationInfo) -> bool:
        if insecure and info.data.get("key_file") is not None:
            raise ValueError("ca_file and key_file are set, so connections are TLS; allowed: one of the two")
        return insecure

    @field_validator("round_timeout")
    @classmethod
    def _outlasts_heartbeats(cls, timeout: float, info: ValidationInfo) -> float:
        shortest = 3 * info.data.get("heartbeat", 0.0)
        if timeout < shortest:
            raise ValueError(
                f"{units.show_duration(timeout)} is shorter than three heartbeats, so a lost peer would "
                f"show only as a timeout; allowed: {units.show_duration(shortest)} or more, or a shorter "
                "heartbeat"
            )
        return timeout

    def secret(self) -> str:
        """The token that both ends must know; empty if none is set, which is allowed on loopback only.

        Raises ``OSError`` if the token file has vanished since the configuration was read.
        """
        if self.token is not None:
            return self.token.get_secret_value()
        return read_token(self.token_file) if self.token_file is not None else ""

    def tls_keys(self) -> Keys | None:
        """The files for TLS, if control connections use it. Raises ``OSError`` and ``ValueError`` if the list of revoked
        certificates has become unreadable since the configuration was read.
        """
        if self.ca_file is None or self.key_file is None:
            return None
        revoked = Revocations(self.revoked_file) if self.revoked_file is not None else None
        return Keys(self.ca_file, self.key_file, revoked)


class WorkerControl(Control):
    """``[control]`` of workers. Without ``coordinator`` they serve jobs whose ranks are all on their host."""

    coordinator: CoordinatorAddress | None = Field(
        default=None, description="where ina-ps or ina-manager listens, host:port or unix:/path"
    )


class ClientControl(Control):
    """``[control]`` of aggregators, and of whoever else needs a coordinator."""

    coordinator: CoordinatorAddress = Field(
        description="where ina-ps or ina-manager listens, host:port or unix:/path"
    )


class CoordinatorControl(Control):
    """``[control]`` of whoever is the coordinator of its fabric: a manager, or the PS."""

    #: where all nodes report: its address is their ``coordinator``
    listen: CoordinatorAddress = HostPort("127.0.0.1", COORDINATOR_PORT)
    #: how every parent sends results to its children: once to a multicast group, or to each by itself; ``auto``: by
    #: multicast to those children that have answered a probe. Switches that do not snoop flood multicast to all ports
    downlink: Literal["multicast", "unicast", "auto"] = "unicast"
    #: every parent of every job has a group of its own from this range
    group_range: GroupRange = GROUP_RANGE
    #: UDP port of multicast results
    group_port: Annotated[int, Field(ge=1, le=65535)] = GROUP_PORT
    #: share of a worker's packets lost in 10 ms beyond which it is told to send less, if rates are negotiated
    loss_threshold: Probability = 0.01
    #: a job whose worker is lost fails what was under way, and goes on with the others
    elastic: Annotated[bool, Field(strict=True)] = False


class PsControl(CoordinatorControl):
    """``[control]`` of the PS. With ``coordinator`` it is a root, and another daemon coordinates."""

    #: where ina-manager listens, if the PS does not coordinate
    coordinator: CoordinatorAddress | None = None
