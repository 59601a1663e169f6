"""Where the agent's socket is looked for, and who a process is, if it does not say so."""

from pathlib import Path

import pytest

import inanet
from inanet.client import environment


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment that says nothing, and system services that do not run."""
    for variable in ("INA_SOCKET", "XDG_RUNTIME_DIR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(environment, "SYSTEM_SOCKETS", (tmp_path / "system.sock",))
    return tmp_path


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INA_SOCKET", "/run/other.sock")
    assert environment.socket_path("/run/mine.sock") == Path("/run/mine.sock")
    assert environment.socket_path() == Path("/run/other.sock")


def test_the_user_s_own_agent_wins_over_the_system_s(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    system, own = bare / "system.sock", bare / "inanet" / "worker.sock"
    system.touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(bare))
    assert environment.socket_path() == system
    own.parent.mkdir()
    own.touch()
    assert environment.socket_path() == own


def test_searching_in_vain_says_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    with pytest.raises(inanet.AgentUnavailable, match="start ina-worker") as caught:
        inanet.connect("train", rank=2, world=4)
    assert caught.value.searched == ("/nowhere/inanet/worker.sock", str(bare / "system.sock"))
    assert (caught.value.job, caught.value.rank) == ("train", 2)
    assert all(place in str(caught.value) for place in caught.value.searched)


def test_a_socket_where_nobody_listens(bare: Path) -> None:
    with pytest.raises(
        inanet.AgentUnavailable, match=r"gone\.sock .*No such file.*start ina-worker"
    ) as caught:
        inanet.connect("train", rank=0, world=1, socket=bare / "gone.sock")
    assert caught.value.searched == (str(bare / "gone.sock"),)


def test_a_path_that_no_socket_can_have(bare: Path) -> None:
    with pytest.raises(inanet.AgentUnavailable, match="too long"):
        inanet.connect("train", rank=0, world=1, socket=bare / ("x" * 200))


def test_numbers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert environment.number("rank", None, "RANK") == 3
    assert environment.number("rank", 0, "RANK") == 0
    assert environment.number("local_world", None, "LOCAL_WORLD_SIZE", default=1) == 1


def test_numbers_that_are_missing_or_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rank= is not given and RANK is not in the environment"):
        inanet.connect("train")
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK is 'first', not a number"):
        inanet.connect("train")


@pytest.mark.parametrize(("rank", "world", "local"), [(4, 4, 1), (-1, 4, 1), (0, 0, 1), (0, 2, 3), (0, 2, 0)])
def test_numbers_that_make_no_sense(rank: int, world: int, local: int) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        inanet.connect("train", rank=rank, world=world, local_world=local, socket="/nowhere")
