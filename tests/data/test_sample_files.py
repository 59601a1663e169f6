"""Files of samples: what is read, and what is refused with file, line and reason."""

import bz2
import gzip
import lzma
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from inanet.data import sample_files, update_counts
from inanet.data.clicks import BadData, Samples, hashed
from inanet.data.sample_files import blocks, load
from inanet.data.update_counts import count_updates
from inanet.proto.zebra.hot import Ranking, of_updates, sample

CLICKS = "label,ad,site\n1,7,news\n0,,shop\n"
KEYS = hashed(["ad=7", "site=news", "site=shop"]).tolist()
VECTORS = "1 3:0.5 9:2\n0 7:1\n"

#: name, content, keys, labels
READ: list[tuple[str, bytes, list[int], list[float]]] = [
    ("plain.csv", CLICKS.encode(), KEYS, [1, 0]),
    ("tabs.csv", CLICKS.replace(",", "\t").encode(), KEYS, [1, 0]),
    ("semicolons.csv", CLICKS.replace(",", ";").encode(), KEYS, [1, 0]),
    ("bars.csv", CLICKS.replace(",", "|").encode(), KEYS, [1, 0]),
    ("blank first.csv", b"\n \n" + CLICKS.encode(), KEYS, [1, 0]),
    ("comment first.csv", b"# of May\n" + CLICKS.encode(), KEYS, [1, 0]),
    ("blank between.csv", CLICKS.replace("\n", "\n\n").encode(), KEYS, [1, 0]),
    ("carriage returns.csv", CLICKS.replace("\n", "\r\n").encode(), KEYS, [1, 0]),
    ("no last line's end.csv", CLICKS.rstrip().encode(), KEYS, [1, 0]),
    ("byte order mark.csv", CLICKS.encode("utf-8-sig"), KEYS, [1, 0]),
    ("utf-16.csv", CLICKS.encode("utf-16"), KEYS, [1, 0]),
    ("utf-16 big.csv", b"\xfe\xff" + CLICKS.encode("utf-16-be"), KEYS, [1, 0]),
    ("utf-32.csv", CLICKS.encode("utf-32"), KEYS, [1, 0]),
    ("packed.csv.gz", gzip.compress(CLICKS.encode()), KEYS, [1, 0]),
    ("gz by another name.csv", gzip.compress(CLICKS.encode()), KEYS, [1, 0]),
    ("bz2 by another name", bz2.compress(CLICKS.encode()), KEYS, [1, 0]),
    ("packed.csv.xz", lzma.compress(CLICKS.encode()), KEYS, [1, 0]),
    ("xz by another name.txt", lzma.compress(CLICKS.encode()), KEYS, [1, 0]),
    ("utf-16 in gz.csv", gzip.compress(CLICKS.encode("utf-16")), KEYS, [1, 0]),
    ("quoted.csv", b'"label","ad","site"\n"1","7","news"\n"0","","shop"\n', KEYS, [1, 0]),
    (
        "comma in quotes.csv",
        b'label,ad\n1,"a,b"\n0,"say ""x"""\n',
        hashed(["ad=a,b", 'ad=say "x"']).tolist(),
        [1, 0],
    ),
    ("semicolons with commas.csv", b"label;ad\n1;a,b\n0;c\n", hashed(["ad=a,b", "ad=c"]).tolist(), [1, 0]),
    ("quote in a cell.csv", b'label,ad\n1,5" tv\n0,x\n', hashed(['ad=5" tv', "ad=x"]).tolist(), [1, 0]),
    ("hash in a cell.csv", b"ad,label\n#7,1\nx,0\n", hashed(["ad=#7", "ad=x"]).tolist(), [1, 0]),
    (
        "latin-1.csv",
        "label,ad\n1,é\n0,è\n".encode("latin-1"),
        hashed(["ad=\udce9", "ad=\udce8"]).tolist(),
        [1, 0],
    ),
    ("no names.csv", b"0,5,x\n1,5,y\n", hashed(["1=5", "2=x", "1=5", "2=y"]).tolist(), [0, 1]),
    ("minus.csv", b"-1;5\n1;6\n", hashed(["1=5", "1=6"]).tolist(), [0, 1]),
    ("plain.svm", VECTORS.encode(), [3, 9, 7], [1, 0]),
    ("blank and comment first.svm", b"\n# why\n" + VECTORS.encode(), [3, 9, 7], [1, 0]),
    ("byte order mark.svm", VECTORS.encode("utf-8-sig"), [3, 9, 7], [1, 0]),
    ("utf-16.svm", VECTORS.encode("utf-16"), [3, 9, 7], [1, 0]),
    ("tabs.svm", VECTORS.replace(" ", "\t").encode(), [3, 9, 7], [1, 0]),
    ("queries.svm", b"1 qid:3 3:0.5 9:2\n0 qid:3 7:1\n", [3, 9, 7], [1, 0]),
    ("first without features.svm", b"0\n1 7:1\n", [7], [0, 1]),
    ("not sorted.svm", b"1 9:2 3:1\n0 1:1\n", [9, 3, 1], [1, 0]),
    ("64 bits.svm", b"1 18446744073709551615:1\n0 0:1\n", [2**64 - 1, 0], [1, 0]),
    ("labels 1 and 2.svm", b"1 3:1\n2 4:1\n2 5:1\n", [3, 4, 5], [0, 1, 1]),
    ("labels 2 and 4.svm", b"4 3:1\n2 4:1\n", [3, 4], [1, 0]),
    ("labels -1 and 0.svm", b"-1 3:1\n0 4:1\n", [3, 4], [0, 1]),
    ("labels -1 and 1.svm", b"-1 3:1\n+1 4:1\n", [3, 4], [0, 1]),
    ("labels 0.0 and 1e0.csv", b"label,a\n0.0,x\n1e0,y\n", hashed(["a=x", "a=y"]).tolist(), [0, 1]),
]

#: name, content, why
REFUSED: list[tuple[str, bytes, str]] = [
    ("empty", b"", "has no samples"),
    ("blank", b"\n \n\n", "has no samples"),
    ("only comments", b"# a\n# b\n", "has no samples"),
    ("only names.csv", b"label,a\n", "has no samples"),
    ("one class.svm", b"1 3:1\n1 4:1\n", "the label of all 2 samples is 1; samples of two classes"),
    ("one class.csv", b"label,a\n0,x\n0,y\n0,z\n", "the label of all 3 samples is 0"),
    ("three classes.svm", b"1 3:1\n2 4:1\n3 5:1\n", r"more than two labels \(1, 2, 3\)"),
    ("regression.svm", b"0.5 1:1\n0.7 1:1\n0.1 1:1\n", r"more than two labels \(0.1, 0.5, 0.7\)"),
    ("many classes.csv", b"y,a\n" + b"".join(b"%d,x\n" % i for i in range(9)), r"\(0, 1, 2, 3, 4\)"),
    ("several labels.svm", b"1,2 3:1\n0 1:1\n", "line 1: '1,2' is several labels"),
    ("nan.csv", b"label,a\n1,x\nnan,y\n", "line 3: 'nan' is no label"),
    ("infinite.svm", b"inf 1:1\n0 1:1\n", "line 1: 'inf' is no label"),
    ("words.csv", b"label,a\nyes,x\nno,y\n", "line 2: 'yes' is no label; labels are numbers"),
    ("underscore.svm", b"1_0 3:1\n", "line 1: '1_0' is no label"),
    ("no label.csv", b"a,b\n1,2\n", "its first line names no label column; one must be label, click"),
    ("quote open.csv", b'label,a\n1,"x\n0,y\n1,z\n', "line 2: .*quote.* not closed|line 2: unexpected end"),
    (
        "quotes over lines.csv",
        b'label,a\n1,"x\n0,y"\n1,z\n',
        "line 2: a quote that begins there is not closed",
    ),
    ("after a quote.csv", b'label,a\n1,x\n0,"y"z\n', "line 3: ',' expected after '\"'"),
    ("columns.csv", b"label,a\n\n1,x\n0\n", "line 4: 1 columns, the first line has 2"),
    ("more columns.csv", b"# c\nlabel,a\n1,x,y\n", "line 3: 3 columns, the first line has 2"),
    ("two names.csv", b"label,a,A\n1,x,y\n", "line 1: two columns are called 'a'"),
    ("long.csv", b"label,a\n1," + b"x" * 200_000 + b"\n", "line 2: field larger than field limit"),
    ("word.svm", b"1 3:0.5\n1 a:1\n", "line 2: 'a:1' is not index:value"),
    ("first word.svm", b"1 a:1\n", "line 1: 'a:1' is not index:value"),
    ("no value.svm", b"\n1 3:\n", "line 2: '3:' is not index:value"),
    ("separators.svm", b"1 3:1_0\n", "line 1: '3:1_0' is not index:value"),
    ("late qid.svm", b"1 3:1 qid:4\n", "line 1: 'qid:4' is not index:value"),
    ("negative.svm", b"1 -3:1\n", "line 1: an index does not fit into 64 bits"),
    ("65 bits.svm", b"1 18446744073709551616:1\n", "line 1: an index does not fit into 64 bits"),
    ("twice.svm", b"0 1:1\n1 3:1 4:1 3:2\n", "line 2: index 3 comes twice"),
    ("nan.svm", b"1 3:0.5\n1 7:nan\n", "line 2: '7:nan' has no value that float32 holds"),
    ("too large.svm", b"1 3:-1e39\n", "line 1: '3:-1e39' has no value that float32 holds"),
    (
        "utf-16 without a mark.csv",
        CLICKS.encode("utf-16-le"),
        "has NUL bytes: it is binary, or UTF-16 without",
    ),
    ("half utf-16.csv", CLICKS.encode("utf-16")[:-1], "is no text"),
    ("zstd.csv", b"\x28\xb5\x2f\xfd0000", "is compressed with zstd"),
    ("log.zip", b"PK\x03\x040000", "is a zip archive"),
    ("log.parquet", b"PAR1....", "is a Parquet file"),
    ("log.npy", b"\x93NUMPY..", "is a NumPy file"),
    ("plain.gz", CLICKS.encode(), "Not a gzipped file"),
    ("plain.xz", CLICKS.encode(), "Not a xz file"),
    ("cut.gz", gzip.compress(CLICKS.encode() * 99)[:60], "cannot read .*cut.gz: "),
    ("cut.xz", lzma.compress(CLICKS.encode() * 99)[:60], "cannot read .*cut.xz: "),
    ("cut.bz2", bz2.compress(CLICKS.encode() * 99)[:60], "cannot read .*cut.bz2: "),
    ("damaged.xz", lzma.compress(CLICKS.encode())[:20] + bytes(60), "cannot read .*damaged.xz: "),
]


def name_of(value: object) -> str:
    return value if isinstance(value, str) and len(value) < 40 else ""


@pytest.mark.parametrize(("name", "content", "keys", "labels"), READ, ids=name_of)
def test_files_are_read_whatever_their_shape(
    tmp_path: Path, name: str, content: bytes, keys: list[int], labels: list[float]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    samples = load(str(path))
    assert samples.keys.tolist() == keys
    assert samples.labels.tolist() == labels
    assert (samples.labels.dtype, samples.start[-1]) == (np.float32, len(keys))


@pytest.mark.parametrize(("name", "content", "why"), REFUSED, ids=name_of)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadData, match=why) as caught:
        load(str(path))
    assert str(path) in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadData, match="cannot read"):
            load(str(path))


def test_unusual_labels_are_told(tmp_path: Path) -> None:
    path, told = tmp_path / "a.svm", list[str]()
    for text in ("1 1:1\n2 1:1\n", "0 1:1\n1 1:1\n", "-1 1:1\n1 1:1\n", "-1 1:1\n0 1:1\n"):
        path.write_text(text)
        load(str(path), told.append)
    assert told == [
        f"{path}: label 2 is the positive class, 1 the negative one",
        f"{path}: label 0 is the positive class, -1 the negative one",
    ]


def test_blocks_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.svm"
    path.write_text("".join(f"{i % 2} {i}:1 {i + 1}:2\n" for i in range(10)))
    whole = load(str(path))
    monkeypatch.setattr(sample_files, "CHUNK", 4)
    assert [len(block) for block in blocks(str(path))] == [4, 4, 2]
    again = load(str(path))
    for one in ("start", "keys", "values", "labels"):
        assert (getattr(whole, one) == getattr(again, one)).all()
    seen: list[tuple[int, int]] = []
    list(blocks(str(path), lambda done, size: seen.append((done, size))))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def drawn(count: int) -> Samples:
    rng = np.random.default_rng(3)
    keys = [np.unique(rng.zipf(1.4, 6).astype(np.uint64)) for _ in range(count)]
    start = np.concatenate([[0], np.cumsum([len(row) for row in keys])]).astype(np.int64)
    every = np.concatenate(keys)
    return Samples("drawn", start, every, np.ones(len(every), np.float32), np.zeros(count, np.float32))


@pytest.mark.parametrize(("count", "size"), [(1000, 64), (1000, 1), (10, 64), (64, 64)])
def test_updates_are_those_of_batches_that_are_drawn(count: int, size: int) -> None:
    samples = drawn(count)
    parts = [samples.take(np.arange(at, min(at + 300, count))) for at in range(0, count, 300)]
    found = count_updates(parts, size, 5, 0.3)
    updates = [np.unique(part.keys) for part in samples.shuffled(5).batches(min(size, count))]
    rows = sample(len(updates), 0.3, np.random.default_rng(5))
    assert found.samples == count
    for ranked, wanted in ((found.all, updates), (found.sampled, [updates[i] for i in rows.tolist()])):
        assert isinstance(ranked, Ranking)
        assert (ranked.keys == of_updates(wanted).keys).all()
        assert (ranked.counts == of_updates(wanted).counts).all()
    assert count_updates(parts, size, 5).sampled is None


def test_memory_is_that_of_a_block_not_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_files, "CHUNK", 256)
    monkeypatch.setattr(update_counts, "_IN_MEMORY", 1 << 12)
    path = tmp_path / "a.svm"
    line = "1 " + " ".join(f"{key}:1" for key in range(0, 5000, 50)) + "\n"
    peaks = []
    for lines in (500, 4000):
        path.write_text(line * lines)
        tracemalloc.start()
        try:
            count_updates(blocks(str(path)), 64, 1, 0.05)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    # eight times the file in less than twice the memory
    assert peaks[1] < 2 * peaks[0]
