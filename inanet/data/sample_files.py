"""Files of sparse samples, read block by block: libsvm, and click logs in columns.

A file is what its bytes say, whatever its name: gzip, bzip2 and xz are unpacked, a byte order mark decides the encoding. In
memory is one block of lines, so that a file may be larger than that.

Why not scikit-learn's libsvm reader: it keeps indices as C longs (hashed keys have 64 bits), refuses rows whose indices are not
sorted, and names no line. Click logs are read by the standard library's :mod:`csv`, strictly.
"""

import bz2
import csv
import gzip
import io
import itertools
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from inanet.data.clicks import BadData, Samples, hashed

#: lines read at a time
CHUNK = 1 << 14
#: columns of a click log that are its label, in the order of preference
LABELS = ("label", "click", "clicked", "target", "y")
_DELIMITERS = "\t,;|"
#: largest value of a feature
_LARGEST = float(np.finfo(np.float32).max)
_UNPACK: dict[bytes, tuple[str, str, Any]] = {
    b"\x1f\x8b": (".gz", "gzipped", gzip.open),
    b"BZh": (".bz2", "bzip2", bz2.open),
    b"\xfd7zXZ\0": (".xz", "xz", lzma.open),
}
_FOREIGN = {
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; decompress it first",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"PAR1": "is a Parquet file; write it as CSV first",
    b"\x93NUMPY": "is a NumPy file; write it as libsvm or CSV first",
    b"\x89HDF": "is an HDF5 file; write it as libsvm or CSV first",
}
_MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
#: Bytes read and bytes in all.
Progress = Callable[[int, int], None]


class Labels:
    """The two labels of a file, which are numbers: the larger one is the positive class."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._counts: dict[float, int] = {}

    def add(self, labels: NDArray[Any]) -> None:
        """Labels of a block. Raises :class:`~inanet.data.clicks.BadData` for a third one."""
        for label, count in zip(
            *(part.tolist() for part in np.unique(labels, return_counts=True)), strict=True
        ):
            self._counts[label] = self._counts.get(label, 0) + count
        if len(self._counts) > 2:
            some = ", ".join(f"{label:g}" for label in sorted(self._counts)[:5])
            raise BadData(f"{self._source} has more than two labels ({some}); a sample is clicked or not")

    def positive(self) -> float:
        """The positive label. Raises :class:`~inanet.data.clicks.BadData` if all samples have the same, or there are none."""
        if not self._counts:
            raise BadData(f"{self._source} has no samples")
        if len(self._counts) == 1:
            ((label, count),) = self._counts.items()
            raise BadData(
                f"{self._source}: the label of all {count} samples is {label:g}; samples of two classes are needed"
            )
        return max(self._counts)

    def said(self) -> str:
        """What the labels are taken for, if that is not plain; else nothing."""
        low, high = sorted(self._counts)
        plain = high == 1 and low in (0, -1)
        return (
            "" if plain else f"{self._source}: label {high:g} is the positive class, {low:g} the negative one"
        )


def blocks(source: str, progress: Progress = lambda done, size: None) -> Iterator[Samples]:
    """The samples of a file, some at a time; labels are those of the file. Columns of a click log are categories, with a label
    among them, which a first line names or which comes first; blank lines, and comments that begin with ``#``, are no samples.

    Raises :class:`~inanet.data.clicks.BadData`, which names file, line and reason.
    """
    path = Path(source)
    try:
        size = path.stat().st_size
        with open(path, "rb") as raw, _text(path, raw) as lines:
            for block in _parsed(source, lines):
                progress(raw.tell(), size)
                yield block
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        # a compressed file that is cut off or damaged is no error of the system's
        why = getattr(error, "strerror", None) or error
        raise BadData(f"cannot read {source}: {why}; 'corpus' needs no file") from error
    except UnicodeError as error:
        raise BadData(f"{source} is no text: {error}") from error


def load(source: str, tell: Callable[[str], None] = lambda text: None) -> Samples:
    """All samples of a file, with labels 0 and 1; ``tell`` is told what other labels are taken for. Raises as :func:`blocks`."""
    labels = Labels(source)
    parts = []
    for part in blocks(source):
        labels.add(part.labels)
        parts.append(part)
    positive = labels.positive()
    if said := labels.said():
        tell(said)
    starts, total = [np.zeros(1, np.int64)], 0
    for part in parts:
        starts.append(part.start[1:] + total)
        total += len(part.keys)
    return Samples(
        source,
        np.concatenate(starts),
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.values for part in parts]),
        (np.concatenate([part.labels for part in parts]) == positive).astype(np.float32),
    )


# ---------------------------------------------------------------- text


def _text(path: Path, raw: IO[bytes]) -> IO[str]:
    """The file's text, whatever it is compressed with and encoded in."""
    head = raw.read(8)
    raw.seek(0)
    for magic, why in _FOREIGN.items():
        if head.startswith(magic):
            raise BadData(f"{path} {why}")
    packed = next((how for magic, how in _UNPACK.items() if head.startswith(magic)), None)
    named = next((how for how in _UNPACK.values() if how[0] == path.suffix), None)
    if packed is None and named is not None and head:
        raise BadData(f"cannot read {path}: Not a {named[1]} file, as its name says")
    data: Any = io.BufferedReader(packed[2](raw)) if packed is not None else raw
    start = data.peek(4)[:4096]
    encoding = next((name for mark, name in _MARKS.items() if start.startswith(mark)), "utf-8")
    if encoding == "utf-8" and b"\0" in start:
        raise BadData(f"{path} has NUL bytes: it is binary, or UTF-16 without a byte order mark")
    # bytes that are no UTF-8 are part of a category all the same
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    return io.TextIOWrapper(data, encoding, errors, newline="")


#: label, names of features (indices, or cells with their columns), values
_Row = tuple[float, list[int] | list[str], list[float]]


def _parsed(source: str, lines: IO[str]) -> Iterator[Samples]:
    top = next((x for x in enumerate(lines, 1) if x[1].strip() and not x[1].startswith("#")), None)
    if top is None:
        raise BadData(f"{source} has no samples")
    number, first = top
    rest = itertools.chain([first], lines)
    parse = _libsvm if _is_libsvm(first) else _columns
    rows = parse(source, rest, number)
    while some := list(itertools.islice(rows, CHUNK)):
        lengths = [len(names) for _, names, _ in some]
        names: list[Any] = [name for _, names, _ in some for name in names]
        yield Samples(
            source,
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            hashed(names) if names and isinstance(names[0], str) else np.array(names, np.uint64),
            np.array([value for _, _, values in some for value in values], np.float32),
            np.array([label for label, _, _ in some], np.float64),
        )


def _number(source: str, number: int, text: str, what: str) -> float:
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadData(f"{source}, line {number}: {text!r} is no {what}; {what}s are numbers")
    return value


# ---------------------------------------------------------------- libsvm


def _is_libsvm(line: str) -> bool:
    """Whether a first line is a label, alone or before features with colons."""
    label, *features = line.partition("#")[0].split()
    if features:
        return all(":" in feature for feature in features)
    return re.fullmatch(r"[-+\d.eE]+", label) is not None


def _libsvm(source: str, lines: Iterable[str], first: int) -> Iterator[_Row]:
    for number, line in enumerate(lines, first):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if "," in fields[0]:
            raise BadData(f"{source}, line {number}: {fields[0]!r} is several labels; a sample has one")
        row: dict[int, float] = {}
        for place, field in enumerate(fields[1:]):
            index, _, value = field.partition(":")
            if index == "qid" and place == 0:
                # whose answer it is in a ranking is no feature
                continue
            try:
                if "_" in field or not field.isascii():
                    raise ValueError
                key, row_value = int(index), float(value)
            except ValueError:
                raise BadData(f"{source}, line {number}: {field!r} is not index:value") from None
            if not abs(row_value) <= _LARGEST:
                raise BadData(f"{source}, line {number}: {field!r} has no value that float32 holds")
            if key in row:
                raise BadData(f"{source}, line {number}: index {key} comes twice")
            row[key] = row_value
        if row and not 0 <= min(row) <= max(row) < 1 << 64:
            raise BadData(f"{source}, line {number}: an index does not fit into 64 bits")
        yield _number(source, number, fields[0], "label"), list(row), list(row.values())


# ---------------------------------------------------------------- columns


def _columns(source: str, lines: Iterable[str], first: int) -> Iterator[_Row]:
    """Every column but the label's is a category: its name is that of the column and the value. Empty cells are no feature.

    Logs without a line of names, as Criteo's are, begin with the label.
    """
    lines = iter(lines)
    top = next(lines)
    delimiter = _delimiter(source, top)
    rows = csv.reader(itertools.chain([top], lines), delimiter=delimiter, strict=True)
    names: list[str] = []
    column, end = 0, 0
    while True:
        number = first + end
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise BadData(
                f"{source}, line {number}: {error}; it is neither a click log nor a libsvm file"
            ) from None
        lines_of_row, end = rows.line_num - end, rows.line_num
        if row is None:
            return
        if lines_of_row > 1:
            raise BadData(
                f"{source}, line {number}: a quote that begins there is not closed in the same line"
            )
        if not row:
            continue
        if not names:
            names = [name.strip().lower() for name in row]
            column = next((names.index(name) for name in LABELS if name in names), -1)
            if len(set(names)) < len(names) and column >= 0:
                twice = next(name for name in names if names.count(name) > 1)
                raise BadData(f"{source}, line {number}: two columns are called {twice!r}")
            if column >= 0:
                continue
            names, column = [str(place) for place in range(len(row))], 0
        if len(row) != len(names):
            raise BadData(f"{source}, line {number}: {len(row)} columns, the first line has {len(names)}")
        words = [f"{names[i]}={cell}" for i, cell in enumerate(row) if cell and i != column]
        yield _number(source, number, row[column], "label"), words, [1.0] * len(words)


def _delimiter(source: str, top: str) -> str:
    """The one with which a first line names a label, or begins with one."""
    cells = {one: [cell.strip().strip('"').lower() for cell in top.split(one)] for one in _DELIMITERS}
    for one, found in cells.items():
        if any(name in found for name in LABELS):
            return one
    for one, found in cells.items():
        if len(found) > 1 and found[0] in ("0", "1", "-1"):
            return one
    raise BadData(
        f"{source}: its first line names no label column; one must be {', '.join(LABELS)}, or the first column of all lines, "
        "without names, a label of 0 or 1"
    )
