"""State files of PS shards: cut off, written anew, without room, held by another."""

import fcntl
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from inanet.proto.zebra import journal
from inanet.service.shard_state import ModelFolder, StateFile


def step(iteration: int, keys: int = 5) -> bytes:
    names, values = np.arange(keys, dtype=np.uint64), np.full((keys, 2), iteration, np.float32)
    return journal.parameters(journal.Record.STEP, iteration, 1, 1, names, values, [values + 0.5])


def iterations(path: Path) -> list[int]:
    with closing(StateFile(path)) as file:
        return [entry.iteration for entry in file.entries()]


def test_what_was_cut_off_is_removed_and_the_next_record_follows_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "shard0.state"
    with closing(StateFile(path)) as file:
        assert list(file.entries()) == []
        for iteration in (1, 2, 3):
            assert not file.append(step(iteration))
    whole = path.read_bytes()
    for cut in (1, 40, len(step(3)) - 1):
        path.write_bytes(whole[:-cut])
        with closing(StateFile(path)) as file:
            found = list(file.entries())
            assert [entry.iteration for entry in found] == [1, 2]
            assert (found[1].values == 2.0).all()
            assert (found[1].states[0] == 2.5).all()
            file.append(step(9))
        assert iterations(path) == [1, 2, 9]


def test_a_file_without_room_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "shard0.state", os.pwrite

    def full(file: int, data: memoryview, at: int) -> int:
        if at > len(step(1)) + 30:
            raise OSError(28, "No space left on device")
        return write(file, data[:20], at)

    with closing(StateFile(path)) as file:
        file.append(step(1))
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            file.append(step(2))
        with pytest.raises(OSError, match="No space left"):
            file.rewrite(step(3) * 2)
        monkeypatch.undo()
        assert path.read_bytes() == step(1)
        assert list(tmp_path.iterdir()) == [path]
        file.append(step(4))
    assert iterations(path) == [1, 4]


def test_a_long_file_is_written_anew_and_is_long_again_when_it_has_grown_to_four_times_that(
    tmp_path: Path,
) -> None:
    path, size = tmp_path / "shard0.state", len(step(1))
    with closing(StateFile(path, least=2 * size)) as file:
        assert [file.append(step(iteration)) for iteration in range(1, 4)] == [False, False, True]
        file.keep()
        file.rewrite(step(3))
        # the file in its place is this process's, too
        with pytest.raises(
            journal.BadState, match=r"shard0.state is in use by another process; a shard runs once"
        ):
            StateFile(path)
        assert [file.append(step(iteration)) for iteration in range(4, 8)] == [False, False, False, True]
    assert iterations(path) == [3, 4, 5, 6, 7]
    assert iterations(path.with_name("shard0.state.before")) == [1, 2, 3]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["shard0.state", "shard0.state.before"]


def test_damage_says_where_and_what_can_be_done(tmp_path: Path) -> None:
    path = tmp_path / "shard0.state"
    with closing(StateFile(path)) as file:
        file.append(step(1) + step(2) + step(3))
    broken = bytearray(path.read_bytes())
    broken[len(step(1)) + 50] ^= 1
    path.write_bytes(broken)
    where = len(step(1))
    with (
        closing(StateFile(path)) as file,
        pytest.raises(
            journal.BadState, match=rf"the record at byte {where} is damaged.* or cut it to {where} B"
        ),
    ):
        list(file.entries())
    assert path.read_bytes() == broken


def test_a_file_in_which_nothing_was_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "shard0.state", fcntl.flock
    first = StateFile(path)
    assert path.exists()

    def late(file: int, how: int) -> None:
        # it is opened by another just before
        first.close()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with closing(StateFile(path)) as file:
        monkeypatch.undo()
        file.append(step(1))
        with pytest.raises(journal.BadState, match="in use by another process"):
            StateFile(path)
    assert iterations(path) == [1]


def test_a_folder_says_which_parts_of_a_model_have_iterations(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path)
    for part, written in (
        ("a.0of2", step(1)),
        ("a.1of2", b""),
        ("a.0of1", journal.born("a", 1)),
        ("a.b.0of2", step(1)),
    ):
        with closing(folder.open(part)) as file:
            if written:
                file.append(written)
    (tmp_path / "a.1of3.state.new").write_bytes(step(1))
    assert folder.trained("a") == ["a.0of2"]
    assert folder.trained("a.b") == ["a.b.0of2"]
    assert folder.trained(".*") == []
    # whoever asks has one of them open, and a part that is cut off there is not for it to remove
    with closing(folder.open("a.0of2")) as file:
        file.append(step(2)[:-1])
        assert folder.trained("a") == ["a.0of2"]
    assert (tmp_path / "a.0of2.state").read_bytes() == step(1) + step(2)[:-1]
    (tmp_path / "a.0of2.state").write_bytes(b"x" * 99)
    with pytest.raises(journal.BadState, match=r"a\.0of2\.state: the record at byte 0 is damaged"):
        folder.trained("a")
