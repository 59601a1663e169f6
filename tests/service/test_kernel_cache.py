"""Where compiled kernels are kept, and that no other user can put some there."""

import os
from pathlib import Path

import pytest

from inanet.service import kernel_cache
from inanet.service.exits import Exit, Failure
from inanet.service.kernel_cache import VARIABLE, ensure, is_temporary


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing that numba tries is writable; the directory that is made then, below a temporary one of the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_cache, "places", lambda: [tmp_path / "file" / "kernels"])
    # registered for removal: what the code sets must not outlive the test
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "kernels"))
    return tmp_path / f"inanet-kernels-{os.geteuid()}"


def test_a_place_that_numba_finds_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not" / "yet"))
    assert kernel_cache.places()[0] == tmp_path / "not" / "yet"
    assert ensure() == ""
    assert os.environ[VARIABLE] == str(tmp_path / "not" / "yet")
    assert not is_temporary(tmp_path / "not" / "yet")


def test_without_a_place_there_is_a_private_one_that_the_next_process_finds_again(private: Path) -> None:
    for _ in range(2):
        assert f"kept in {private} for now: set {VARIABLE}" in ensure()
        assert os.environ[VARIABLE] == str(private)
        assert private.stat().st_mode & 0o777 == 0o700
    assert is_temporary(private)


@pytest.mark.parametrize("planted", ["link", "open", "foreign", "file"])
def test_what_another_user_may_have_planted_is_not_used(
    planted: str, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        private.symlink_to(tmp_path / "elsewhere")
    elif planted == "file":
        private.touch(0o600)
    else:
        private.mkdir(0o700)
        private.chmod(0o777 if planted == "open" else 0o700)
    if planted == "foreign":
        private.rename(tmp_path / f"inanet-kernels-{os.geteuid() + 1}")
        private = tmp_path / f"inanet-kernels-{os.geteuid() + 1}"
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    ensure()
    chosen = Path(os.environ[VARIABLE])
    assert chosen != private
    assert chosen.name.startswith(f"{private.name}-")
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert not chosen.is_symlink()
    assert is_temporary(chosen)


@pytest.mark.usefixtures("private")
def test_without_a_temporary_directory_it_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(
        Failure, match=rf"no directory to keep compiled kernels in .*export {VARIABLE}="
    ) as refused:
        ensure()
    assert refused.value.code is Exit.PERMISSION
