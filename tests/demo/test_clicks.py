"""Readers of sparse data, and the corpus."""

from pathlib import Path

import numpy as np
import pytest

from inanet.demo.clicks import BadData, _hashed, load, of_words


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
    assert samples.keys[:2].tolist() == samples.keys[3:].tolist() == _hashed(["site=news", "ad=7"]).tolist()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.svm", "1 3:0.5\n1 x:1\n", "line 2: 'x:1' is not index:value"),
        ("a.svm", "1 3:0.5\nyes 4:1\n", "line 2: 'yes' is no label"),
        ("a.svm", "1 18446744073709551616:1\n", "does not fit into 64 bits"),
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


def test_words_and_pairs_are_features_and_the_answer_is_none() -> None:
    words = _hashed(["def", "f", "return", "x", "def", "f", "x", "g"])
    sample = np.array([0, 0, 0, 0, 0, 2, 2, 2])
    plain = of_words(words, sample, pairs=False)
    assert plain.labels.tolist() == [1.0, 0.0]
    assert plain.start.tolist() == [0, 3, 6]
    assert set(plain.keys[:3].tolist()) == set(_hashed(["def", "f", "x"]).tolist())
    paired = of_words(words, sample, pairs=True)
    # def-f, f-x, x-def; then f-x, x-g: one pair is the same in both
    assert paired.start.tolist() == [0, 6, 11]
    assert len(np.unique(paired.keys)) == 4 + 4
