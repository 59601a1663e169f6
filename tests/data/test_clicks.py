"""Readers of sparse data, and the corpus."""

import bz2
import gzip
from pathlib import Path

import numpy as np
import pytest

from inanet.data import clicks, datasets
from inanet.data.clicks import BadData, corpus, hashed, of_words
from inanet.data.interactions import of_pairs
from inanet.data.sample_files import load


def test_libsvm_files(tmp_path: Path) -> None:
    path = tmp_path / "a.svm"
    path.write_text("# made up\n+1 3:0.5 18446744073709551615:2\n\n-1 7:1 # why\n")
    samples = load(str(path))
    assert samples.labels.tolist() == [1.0, 0.0]
    assert samples.start.tolist() == [0, 2, 3]
    assert samples.keys.tolist() == [3, 2**64 - 1, 7]
    assert samples.values.tolist() == [0.5, 2.0, 1.0]
    turned = samples.take(np.array([1, 0]))
    assert turned.keys.tolist() == [7, 3, 2**64 - 1]
    assert [len(batch) for batch in samples.batches(1)] == [1, 1]


def test_click_logs(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("site,Click,ad\nnews,0,7\nshop,1,\nnews,1,7\n")
    samples = load(str(path))
    assert samples.labels.tolist() == [0.0, 1.0, 1.0]
    assert samples.start.tolist() == [0, 2, 3, 5]
    assert samples.keys[:2].tolist() == samples.keys[3:].tolist() == hashed(["site=news", "ad=7"]).tolist()


def test_logs_without_a_line_of_names_begin_with_the_label(tmp_path: Path) -> None:
    """As Criteo's: the label, numbers, categories, separated by tabs, compressed."""
    path = tmp_path / "day_0.gz"
    with gzip.open(path, "wt") as out:
        out.write("0\t5\t\t68fd1e64\n1\t\t3\t68fd1e64\n")
    samples = load(str(path))
    assert samples.labels.tolist() == [0.0, 1.0]
    assert samples.start.tolist() == [0, 2, 4]
    assert samples.keys.tolist() == hashed(["1=5", "3=68fd1e64", "2=3", "3=68fd1e64"]).tolist()
    path.write_bytes(b"no gzip")
    with pytest.raises(BadData, match=r"cannot read .*day_0.gz: Not a gzipped file"):
        load(str(path))


def test_names_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "corpus", lambda scope: scope)
    monkeypatch.setattr(datasets, "interactions", lambda: "pairs")
    assert [datasets.load(name) for name in datasets.NAMES] == ["library", "tests", "packages", "pairs"]


def test_a_first_sample_without_features_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a.bz2"
    path.write_bytes(bz2.compress(b"0\n1 7:1\n"))
    assert load(str(path)).start.tolist() == [0, 0, 1]


def test_corpora_are_the_librarys_its_tests_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json/decoder.py", "test/test_json.py", "site-packages/foreign.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(clicks.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(clicks, "_PACKAGES", ("click", "no_such_package"))
    library, tests, everything = (set(clicks._files(scope)) for scope in ("library", "tests", "packages"))
    assert {path.name for path in library} == {"decoder.py"}
    assert {path.name for path in tests} == {"decoder.py", "test_json.py"}
    assert tests < everything
    assert {path.parts[-2] for path in everything - tests} == {"click"}


def test_the_corpus_is_read_from_files_eight_lines_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * 9)
    (tmp_path / "b.py").write_text("# nothing here\n\nreturn y\n")
    (tmp_path / "c.py").write_text("")
    found = [tmp_path / name for name in ("c.py", "a.py", "b.py")]
    monkeypatch.setattr(clicks, "_files", lambda scope: found)
    clicks.sources.cache_clear()
    try:
        words, sample, file = clicks.sources()
        assert words.tolist() == hashed(["x"] * 9 + ["nothing", "here", "return", "y"]).tolist()
        assert sample.tolist() == [0] * 8 + [1] + [2] * 4
        assert file.tolist() == [1] * 9 + [2] * 4
        # not through the cache of corpora, which other tests share
        assert corpus.__wrapped__(pairs=False).labels.tolist() == [0.0, 0.0, 1.0]
    finally:
        clicks.sources.cache_clear()


def test_interactions_are_pairs_that_met_and_pairs_that_did_not() -> None:
    users = np.repeat(np.arange(6), 4)
    items = np.array([item for user in range(6) for item in (1, 2, 2, 3 + user)], np.uint64)
    samples = of_pairs(users, items, least=3)
    met = samples.take(np.flatnonzero(samples.labels == 1))
    missed = samples.take(np.flatnonzero(samples.labels == 0))
    # items 1 and 2 have met everybody, so that no pair of them is left that did not
    assert len(met) == 12
    assert len(missed) == 0
    assert len(np.unique(met.keys[0::2])) == 6
    assert len(np.unique(met.keys[1::2])) == 2
    assert not set(met.keys[0::2].tolist()) & set(met.keys[1::2].tolist())
    some = of_pairs(np.repeat(np.arange(20), 3), np.arange(60, dtype=np.uint64) % np.uint64(7), least=3)
    pairs = some.keys.reshape(-1, 2)
    assert len(np.unique(pairs, axis=0)) == len(pairs)
    assert 0.3 < some.labels.mean() < 0.6
    with pytest.raises(BadData, match="no item has met 9 users"):
        of_pairs(users[:4], items[:4], least=9)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.svm", "1 3:0.5\n1 x:1\n", "line 2: 'x:1' is not index:value"),
        ("a.svm", "1 3:0.5\nyes 4:1\n", "line 2: 'yes' is no label"),
        ("a.svm", "1 18446744073709551616:1\n", "does not fit into 64 bits"),
        ("a.svm", "1 3:0.5\n1 7:nan\n", "line 2: '7:nan' has no value that float32 holds"),
        ("a.svm", "1 3:-1e39\n", "line 1: '3:-1e39' has no value that float32 holds"),
        ("a.csv", "label,a\n1,x\nnan,y\n", "line 3: 'nan' is no label"),
        ("a.csv", "label,a\n1," + "x" * 200_000 + "\n", "field larger than field limit"),
        ("a.csv", "a,b\n1,2\n", "names no label column"),
        ("a.csv", "a,label\n1\n", "line 2: 1 columns, the first line has 2"),
        ("a.csv", "\n", "has no samples"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadData, match=message) as caught:
        load(str(path))
    assert str(path) in str(caught.value)
    with pytest.raises(BadData, match="cannot read"):
        load(str(tmp_path / "missing"))


@pytest.mark.parametrize("damage", [slice(0, 40), slice(0, None)])
def test_compressed_files_that_are_cut_off_or_damaged_are_named(tmp_path: Path, damage: slice) -> None:
    path = tmp_path / "day.gz"
    whole = bytearray(gzip.compress(b"1 3:0.5\n" * 3 + b"0 12345:0.25 99:1\n" * 50))
    if damage.stop is None:
        # a block of a type that there is not
        whole[10] = 7
    path.write_bytes(whole[damage])
    with pytest.raises(BadData, match=r"cannot read .*day.gz: "):
        load(str(path))


def test_words_and_pairs_are_features_and_the_answer_is_none() -> None:
    words = hashed(["def", "f", "return", "x", "def", "f", "x", "g"])
    sample = np.array([0, 0, 0, 0, 0, 2, 2, 2])
    plain = of_words(words, sample, pairs=False)
    assert plain.labels.tolist() == [1.0, 0.0]
    assert plain.start.tolist() == [0, 3, 6]
    assert set(plain.keys[:3].tolist()) == set(hashed(["def", "f", "x"]).tolist())
    paired = of_words(words, sample, pairs=True)
    # def-f, f-x, x-def; then f-x, x-g: one pair is the same in both
    assert paired.start.tolist() == [0, 6, 11]
    assert len(np.unique(paired.keys)) == 4 + 4
