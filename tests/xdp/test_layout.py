"""The layouts of ``layout.h``, as the compiler sees them, are those of the arrays and packets in Python."""

import re
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inanet.proto.tree import slots
from inanet.proto.tree.engine import Count, Event
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.xagg import GROUP, ROW, VALUES, Kind
from inanet.xdp import inbox, memory
from inanet.xdp.build import OBJECT, OBJECTS, WORKER_OBJECT

#: kinds of BTF types that lead to another type without changing the layout
MODIFIERS = {8, 9, 10, 11, 18}


class Btf:
    """Structures and enumerations of an object file, by name."""

    def __init__(self, image: bytes) -> None:
        data = section(image, b".BTF")
        _, _, _, header, types, type_bytes, strings, _ = struct.unpack_from("<HBBIIIII", data)
        self._strings = data[header + strings :]
        self._types: list[tuple[str, int, int, int, bytes]] = [("", 0, 0, 0, b"")]
        at, end = header + types, header + types + type_bytes
        while at < end:
            name, info, size = struct.unpack_from("<III", data, at)
            kind, count = info >> 24 & 31, info & 0xFFFF
            extra = {1: 4, 3: 12, 4: 12 * count, 5: 12 * count, 6: 8 * count, 13: 8 * count, 14: 4}
            extra |= {15: 12 * count, 17: 4, 19: 12 * count}
            length = extra.get(kind, 0)
            self._types.append((self._name(name), kind, size, count, data[at + 12 : at + 12 + length]))
            at += 12 + length

    def _name(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _find(self, name: str, kinds: tuple[int, ...]) -> tuple[str, int, int, int, bytes]:
        return next(entry for entry in self._types if entry[0] == name and entry[1] in kinds)

    def enumeration(self, name: str) -> dict[str, int]:
        """Values by name."""
        _, _, _, count, body = self._find(name, (6,))
        pairs = [struct.unpack_from("<Ii", body, 8 * index) for index in range(count)]
        return {self._name(offset): value for offset, value in pairs}

    def structure(self, name: str) -> tuple[int, dict[str, tuple[int, int]]]:
        """Size, and offset and size of each member."""
        _, _, size, count, body = self._find(name, (4,))
        members = [struct.unpack_from("<III", body, 12 * index) for index in range(count)]
        return size, {self._name(offset): (bits // 8, self._size(kind)) for offset, kind, bits in members}

    def _size(self, index: int) -> int:
        _, kind, size, _, body = self._types[index]
        if kind in MODIFIERS:
            return self._size(size)
        if kind == 3:
            element, _, count = struct.unpack("<III", body)
            return self._size(element) * count
        return 8 if kind == 2 else size


def section(image: bytes, wanted: bytes) -> bytes:
    """Contents of a section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", image, 40)
    entry, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + entry * index) for index in range(count)]
    start = headers[names][4]
    for name, _, _, _, offset, size in headers:
        if image[start + name : image.index(b"\0", start + name)] == wanted:
            return image[offset : offset + size]
    raise KeyError(wanted)


@pytest.fixture(scope="module")
def btf() -> Btf:
    """Of the committed object."""
    return Btf(OBJECT.read_bytes())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("xagg_row", ROW),
        ("xagg_header", ROW["header"]),
        ("event", memory.EVENT),
        ("route", memory.ROUTE),
        ("busy", memory.BUSY),
        ("figures", memory.FIGURES),
        ("tables", memory.TABLES),
        ("geometry", memory.GEOMETRY),
        ("hop", memory.HOP),
    ],
)
def test_structures(btf: Btf, name: str, dtype: np.dtype[Any]) -> None:
    size, members = btf.structure(name)
    assert dtype.fields is not None
    assert size == dtype.itemsize
    assert members == {field: (entry[1], entry[0].itemsize) for field, entry in dtype.fields.items()}


@pytest.fixture(scope="module")
def worker_btf() -> Btf:
    """Of the committed object of workers."""
    return Btf(WORKER_OBJECT.read_bytes())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("xagg_row", ROW),
        ("run", inbox.RUN),
        ("inbox", inbox.INBOX),
        ("sender", inbox.SENDER),
        ("inbox_geometry", inbox.INBOX_GEOMETRY),
    ],
)
def test_structures_of_a_worker(worker_btf: Btf, name: str, dtype: np.dtype[Any]) -> None:
    test_structures(worker_btf, name, dtype)


def test_codes_of_a_worker(worker_btf: Btf) -> None:
    test_enumerations(worker_btf, "kind", "K_", Kind)
    assert worker_btf.enumeration("inbox_count") == {
        f"I_{member.name}": int(member) for member in inbox.InboxCount
    } | {"INBOX_COUNTS": inbox.INBOX_COUNTS}


@pytest.mark.parametrize(
    ("name", "prefix", "reference"),
    [
        ("kind", "K_", Kind),
        ("state", "S_", slots.State),
        ("shard_column", "SHARD_", slots.ShardColumn),
        ("tree_column", "TREE_", slots.TreeColumn),
        ("job_column", "JOB_", slots.JobColumn),
    ],
)
def test_enumerations(btf: Btf, name: str, prefix: str, reference: type[IntEnum]) -> None:
    found = {key.removeprefix(prefix): value for key, value in btf.enumeration(name).items()}
    found.pop("COLUMNS", None)
    assert found == {member.name: int(member) for member in reference}


def test_codes_that_both_sides_count(btf: Btf) -> None:
    for prefix, name, reference in (
        ("D_", "drop", Drop),
        ("C_", "count", Count),
        ("E_", "event_code", Event),
    ):
        for key, value in btf.enumeration(name).items():
            known = key.startswith(prefix) and value in reference._value2member_map_
            if known:
                assert reference(value).name == key.removeprefix(prefix)
    assert btf.enumeration("drop")["DROPS"] == memory.DROPS >= DROP_CODES
    assert btf.enumeration("count")["COUNTS"] == memory.COUNTS
    assert btf.enumeration("count") == {f"C_{member.name}": int(member) for member in Count} | {
        f"C_{member.name}": int(member) for member in memory.KernelCount
    } | {"COUNTS": memory.COUNTS}
    assert {key: value for key, value in btf.enumeration("event_code").items() if value >= 100} == {
        f"E_{member.name}": int(member) for member in memory.KernelEvent
    }
    for flag in memory.Held:
        assert btf.enumeration("held")[flag.name] == flag
    for flag in ("LOGGED_UP", "LOGGED_DOWN", "LEFT_UP", "LEFT_DOWN"):
        assert btf.enumeration("logged")[flag] == getattr(slots, flag)
    assert GROUP == 1024
    assert VALUES == 256


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name)
def test_licence_and_no_paths(path: Path) -> None:
    image = path.read_bytes()
    assert section(image, b"license") == b"Dual BSD/GPL\0"
    assert b"clang version" not in image
    # headers beside the source, and no folder of the machine that compiled it
    assert {path[:3] for path in re.findall(rb"/[\w.-]+/[\w./-]*", image)} <= {b"/./"}
