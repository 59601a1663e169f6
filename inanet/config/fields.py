"""Types of the values in configuration files: each accepts what people write and refuses the rest in a
sentence.

A refusal reads ``what is wrong; allowed: what is``. Every type also writes its value the way it is read.
"""

import errno
import os
import re
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, ValidationInfo

from inanet import units
from inanet.messages.names import check_name
from inanet.proto.slots.systems import TREES, tensor_systems
from inanet.service.addresses import HostPort, parse_host_port
from inanet.service.limits import reason_of

#: Where the coordinator listens unless told otherwise.
COORDINATOR_PORT = 7400
#: Where multicast groups are taken from unless told otherwise: the organisation's own (RFC 2365, section 6.2).
GROUP_RANGE = IPv4Network("239.192.0.0/14")
GROUP_PORT = 7401
#: A token shorter than this is guessed too soon.
TOKEN_CHARACTERS = 16
#: Longest token a control message carries.
TOKEN_LIMIT = 1024

#: groups that no provider routes on (RFC 2365)
_SCOPED = IPv4Network("239.0.0.0/8")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def _system(text: object) -> str:
    if text not in (TREES, *tensor_systems()):
        raise ValueError(f"{text!r} is no system; allowed: {', '.join((TREES, *tensor_systems()))}")
    return str(text)


SystemName = Annotated[str, PlainValidator(_system)]


def _one_or_many(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,)


def _probability(value: object) -> float:
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
        value = float(match[1]) / 100
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"{value!r} is not a probability; allowed: 0 up to but not including 1, or e.g. '5 %'"
        )
    return float(value)


def _file_mode(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"0?[0-7]{3}", value, re.ASCII):
        value = int(value, 8)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 0o777:
        raise ValueError(f"{value!r} is not a file mode; allowed: e.g. '0660' or 0o660")
    return value


def _absolute(text: object, info: ValidationInfo) -> str:
    """A path with environment variables filled in, relative to the directory of the configuration file."""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{text!r} is not a path; allowed: a path, environment variables are filled in")
    path = os.path.expandvars(text)
    for name, instead in (info.context or {}).get("variables", {}).items():
        # of services only: set in their environment, and to the same places by those who look at them from a shell
        path = path.replace(f"${{{name}}}", instead).replace(f"${name}", instead)
    if "$" in path:
        raise ValueError(
            f"{text!r}: a variable in it is not set; allowed: a path with variables that are set"
        )
    directory: Path = (info.context or {}).get("directory", Path.cwd())
    return os.path.normpath(os.path.join(directory, path))


def _positive(value: object) -> float:
    seconds = units.parse_duration(value)
    if seconds <= 0:
        raise ValueError(f"{value!r} is too short; allowed: any longer duration")
    return seconds


def _some_rate(value: object) -> int:
    rate = units.parse_rate(value)
    if rate <= 0:
        raise ValueError(
            f"{value!r} lets nothing pass; allowed: any higher rate, or leave it out for no limit"
        )
    return rate


def _group_range(text: object) -> IPv4Network:
    try:
        found = IPv4Network(text) if isinstance(text, str) else None
    except ValueError:
        found = None
    if found is None or not found.subnet_of(_SCOPED):
        raise ValueError(
            f"{text!r} is not a range of multicast groups for private use; allowed: a part of {_SCOPED}, "
            f"e.g. '{GROUP_RANGE}'"
        )
    return found


def between(low: int, high: int) -> AfterValidator:
    """Check of a size in bytes, in the words of :mod:`inanet.units`."""

    def check(size: int) -> int:
        if not low <= size <= high:
            allowed = f"{units.show_bytes(low)} to {units.show_bytes(high)}"
            raise ValueError(f"{units.show_bytes(size)} is out of range; allowed: {allowed}")
        return size

    return AfterValidator(check)


def span(text: str) -> Any:
    """Default of a duration, written as in the file and checked against the keys before it."""
    return Field(default=text, validate_default=True)


def _authenticated(address: HostPort, info: ValidationInfo) -> HostPort:
    """A control address, if it stays on this machine, or connections are TLS, or somebody has written down that a token is
    enough (a wrong proof is reported itself).
    """
    known = info.data
    if address.local or known.get("key_file", "") is not None:
        return address
    if not known.get("insecure", False):
        raise ValueError(
            f"{str(address)!r} is open to other machines and control connections would not be encrypted; allowed: "
            "ca_file and key_file, which 'ina keys' makes, a loopback address, unix:/path, or insecure = true with a "
            "token_file, where whoever sees the network may read the token and take over jobs"
        )
    if all(known.get(proof, "") is None for proof in ("token", "token_file")):
        raise ValueError(
            f"{str(address)!r} is open to other machines and no token is set; allowed: the same token_file "
            "(or token) on all nodes, ca_file and key_file, or a loopback address"
        )
    return address


def check_token(token: str) -> None:
    """Raise ``ValueError`` for a token too short to be safe or too long to be sent."""
    if not TOKEN_CHARACTERS <= len(token) <= TOKEN_LIMIT:
        # the token itself is not repeated: messages end up in logs
        raise ValueError(
            f"the token has {len(token)} characters; allowed: {TOKEN_CHARACTERS} to {TOKEN_LIMIT}, e.g. "
            "from 'openssl rand -hex 32'"
        )


def read_token(path: str) -> str:
    """The token in a file, without surrounding white space. Raises ``ValueError`` naming file and cause."""
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise ValueError(f"cannot read {path}: {reason_of(error)}; allowed: more descriptors") from None
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"cannot read {path}: {what}; allowed: a readable file with one line") from None


#: Bytes, as ``int``.
Bytes = Annotated[int, BeforeValidator(units.parse_bytes), PlainSerializer(units.show_bytes, return_type=str)]
#: Seconds, as ``float``; ``Span`` is longer than nothing.
Duration = Annotated[
    float, BeforeValidator(units.parse_duration), PlainSerializer(units.show_duration, return_type=str)
]
Span = Annotated[float, BeforeValidator(_positive), PlainSerializer(units.show_duration, return_type=str)]
#: Bits per second, as ``int``; more than nothing.
Rate = Annotated[int, BeforeValidator(_some_rate), PlainSerializer(units.show_rate, return_type=str)]
Probability = Annotated[float, BeforeValidator(_probability)]
Name = Annotated[str, BeforeValidator(check_name)]
#: One or several names.
Parents = Annotated[tuple[Name, ...], BeforeValidator(_one_or_many)]
#: Permission bits of a file.
FileMode = Annotated[
    int, BeforeValidator(_file_mode), PlainSerializer(lambda mode: f"{mode:04o}", return_type=str)
]
#: A path relative to the file, with environment variables.
AbsolutePath = Annotated[str, BeforeValidator(_absolute)]
_SHOW = PlainSerializer(str, return_type=str)
#: Where packets arrive (port 0 unless given), where a service listens (port required), where the coordinator
#: is.
DataAddress = Annotated[HostPort, PlainValidator(lambda text: parse_host_port(text, default_port=0)), _SHOW]
ServiceAddress = Annotated[HostPort, PlainValidator(parse_host_port), _SHOW]
GroupRange = Annotated[IPv4Network, PlainValidator(_group_range), _SHOW]
CoordinatorAddress = Annotated[
    HostPort,
    PlainValidator(lambda text: parse_host_port(text, default_port=COORDINATOR_PORT, unix=True)),
    AfterValidator(_authenticated),
    _SHOW,
]
