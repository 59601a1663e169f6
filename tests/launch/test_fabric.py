import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from inanet.config.daemons import MODELS, load
from inanet.launch import guardian, nodes, process
from inanet.launch.configuration import configurations
from inanet.launch.fabric import Fabric
from inanet.launch.nodes import FabricError
from inanet.launch.process import (
    Process,
    end_all,
    python,
    python_environment,
    runtime_directory,
    script,
)
from inanet.launch.topology import NodeSpec, keyed, topology, two_level
from tests.launch.owner import STANDIN, command

standins = functools.partial(command, "")
OWNER = Path(__file__).with_name("owner.py")


@pytest.fixture
def tmp_path():
    """Short whatever pytest has numbered its own directory: Unix sockets have to fit below it."""
    with tempfile.TemporaryDirectory(prefix="ina", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _private_temporary_directory(tmp_path, monkeypatch):
    """Fabrics keep their directories here, so that a test sees everything that is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def ended(pids, patience=30.0):
    """Whether all processes end within ``patience`` seconds; they need not be children."""
    waiting = select.poll()
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
        waiting.register(handles[-1], select.POLLIN)
    deadline = time.monotonic() + patience
    left = set(handles)
    while left and time.monotonic() < deadline:
        for handle, _ in waiting.poll((deadline - time.monotonic()) * 1000):
            left.discard(handle)
            waiting.unregister(handle)
    for handle in handles:
        os.close(handle)
    return not left


def test_a_fabric_lives_as_long_as_its_block(tmp_path):
    with Fabric(3, 2, command=standins) as fabric:
        pids = [member.pid for member in fabric.processes.values()]
        assert sorted(fabric.processes) == ["agg0", "agg1", "ps", "worker0", "worker1", "worker2"]
        assert all(member.poll() is None for member in fabric.processes.values())
        assert fabric.worker_socket(2).is_socket()
        assert fabric.directory.parent == tmp_path
        assert fabric.directory.stat().st_mode & 0o777 == 0o700
        fabric.require_alive()
        pids.append(fabric._guardian.pid)
    assert ended(pids, 0)
    assert list(tmp_path.iterdir()) == []


def test_children_are_asked_to_end_with_their_parent():
    with Fabric(1, 0, command=standins) as fabric:
        assert f"worker0 dies with signal {signal.SIGTERM:d}" in fabric.processes["worker0"].tail()


def test_counters_are_summed_over_restarts_and_lack_the_killed():
    with Fabric(2, 1, command=standins) as fabric:
        fabric.processes["worker0"].terminate()
        assert fabric.processes["worker0"].wait(time.monotonic() + 10) == 0
        fabric.restart("worker0")
        fabric.processes["agg0"].kill()
        fabric.require_alive()
        assert fabric.shutdown() == []
        stats = fabric.stats()
    assert sorted(stats) == ["ps", "worker0", "worker1"]
    assert stats["worker0"].rx_bytes == 2 * stats["worker1"].rx_bytes == 14
    assert stats["ps"].drops == {"injected": 1}


def test_a_crash_and_a_restart():
    with Fabric(1, 1, command=standins) as fabric:
        first = fabric.processes["ps"]
        with pytest.raises(FabricError, match=f"ps still runs as process {first.pid}"):
            fabric.restart("ps")
        first.kill()
        assert first.poll() == -signal.SIGKILL
        fabric.restart("ps")
        assert fabric.processes["ps"].pid != first.pid
        assert fabric.processes["ps"].poll() is None
        fabric.require_alive()


def test_a_daemon_that_ends_unasked_is_named_with_its_log():
    with Fabric(1, 1, command=standins) as fabric:
        os.kill(fabric.processes["agg0"].pid, signal.SIGKILL)
        fabric.processes["agg0"].wait(time.monotonic() + 10)
        with pytest.raises(
            FabricError, match=r"(?s)agg0 ended unasked with status -9.*agg0 dies with signal 15"
        ):
            fabric.require_alive()


def test_a_daemon_that_does_not_start_is_named_and_nothing_is_left(tmp_path):
    with (
        pytest.raises(FabricError, match=r"(?s)agg0 ended unasked with status 1.*no such thing as luck"),
        Fabric(2, 1, command=functools.partial(command, "broken")),
    ):
        pytest.fail("the block is not entered")
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_that_never_becomes_ready_is_named(tmp_path, monkeypatch):
    def run_out_of_time_once_it_runs():
        logs = list(tmp_path.glob("*/agg0.log"))
        if logs and logs[0].read_text():
            monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: float("inf")))

    with (
        pytest.raises(FabricError, match=r"(?s)not ready: agg0.*, after \d+ s\n.*agg0 dies with signal"),
        Fabric(2, 1, command=functools.partial(command, "mute"), check=run_out_of_time_once_it_runs),
    ):
        pytest.fail("the block is not entered")
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_that_compiles_kernels_too_long_is_to_be_started_again(monkeypatch):
    told = []

    def run_out_of_time(how_far):
        told.append(how_far)
        monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: float("inf")))

    behaviour = functools.partial(command, "compiling")
    with (
        pytest.raises(
            FabricError, match=r"not ready: agg0.*, after \d+ s; kernels .* is kept: run it again\n"
        ),
        Fabric(1, 1, command=behaviour, compiling=run_out_of_time),
    ):
        pytest.fail("the block is not entered")
    assert told == ["compiling kernel 1"]


def test_a_daemon_that_does_not_end_is_killed_and_named(monkeypatch):
    with Fabric(1, 1, command=functools.partial(command, "deaf")) as fabric:
        assert end_all([fabric.processes["worker0"], fabric.processes["ps"]], 30) == []
        monkeypatch.setattr(nodes, "STOP_PATIENCE", 0.2)
        assert fabric.shutdown() == ["agg0"]
        assert fabric.processes["agg0"].poll() == -signal.SIGKILL
        assert "agg0" not in fabric.stats()


def test_an_exception_in_the_block_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), Fabric(1, 1, command=standins) as fabric:  # noqa: PT012
        pids = [member.pid for member in fabric.processes.values()]
        raise KeyboardInterrupt
    assert ended(pids, 0)
    assert list(tmp_path.iterdir()) == []


def test_the_caller_may_give_up_while_the_fabric_starts(tmp_path):
    def give_up():
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError), Fabric(1, 0, command=standins, check=give_up):
        pytest.fail("the block is not entered")
    assert list(tmp_path.iterdir()) == []


def own(tmp_path, *arguments):
    """The owner program, once it waits, and what it announced."""
    owner = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.launch.owner", str(tmp_path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=python_environment(),
    )
    line = owner.stdout.readline()
    if not line:
        pytest.fail(owner.communicate()[1])
    return owner, json.loads(line)


def test_kill_9_of_the_owner_leaves_nothing(tmp_path):
    owner, announced = own(tmp_path)
    assert Path(announced["directory"]).is_dir()
    owner.kill()
    owner.communicate()
    assert ended(announced["pids"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_with_130_and_leaves_nothing(tmp_path, number):
    owner, announced = own(tmp_path, "mute", "--json")
    owner.send_signal(number)
    output, errors = owner.communicate(timeout=60)
    assert owner.returncode == 130
    assert output == ""
    assert f"{number.name}: every process was ended and every file removed" in errors
    assert ended(announced["pids"], 0)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_start_is_reported_as_json_too(tmp_path):
    owner, _ = own(tmp_path, "broken", "--json")
    output, errors = owner.communicate(timeout=60)
    assert owner.returncode == 1
    answer = json.loads(output)
    assert answer["ok"] is False
    assert answer["accuracy"] is None
    assert "no such thing as luck" in answer["error"]
    assert "no such thing as luck" in errors


def test_a_process_is_not_started_for_a_parent_that_has_ended():
    arguments = script(
        process._CHILD, "1" if os.getpid() != 1 else "2", "-", sys.executable, "-c", "print('alive')"
    )
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "has ended" in done.stderr


def test_the_guardian_kills_what_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(guardian, "GRACE", 0.2)
    deaf = [sys.executable, "-I", "-S", "-c"]
    deaf.append(
        "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, [s.SIGTERM]); print(1, flush=True); s.pause()"
    )
    child = subprocess.Popen(deaf, stdout=subprocess.PIPE)
    child.stdout.readline()
    handle = os.pidfd_open(child.pid)
    guardian.end([handle])
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    os.close(handle)


def test_end_all_names_only_the_stubborn(tmp_path):
    idle = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    members = [Process(f"p{k}", idle, tmp_path / f"p{k}.log", {}, pipe=True) for k in range(2)]
    assert end_all(members, 10) == []
    assert [member.poll() for member in members] == [-signal.SIGTERM] * 2
    assert members[0].output.closed


def test_children_import_this_very_package(tmp_path):
    code = "import inanet, sys; print(inanet.__file__); print('' in sys.path)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=python_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    import inanet

    assert done.stdout.splitlines() == [inanet.__file__, "False"]
    assert python("a.b", "c")[1:] == ["-P", "-m", "a.b", "c"]


def test_a_long_temporary_directory_is_no_place_for_sockets(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    directory = runtime_directory()
    assert directory.parent == Path("/tmp")
    directory.rmdir()


@pytest.mark.parametrize("impair", [0.0, 0.05])
def test_configurations_are_what_the_daemons_take(tmp_path, impair):
    nodes = two_level(4, 2)
    texts = configurations(tmp_path, nodes, impair, seed=9)
    read = {}
    for node in nodes:
        (tmp_path / f"{node.name}.toml").write_text(texts[node.name])
        read[node.name] = load(tmp_path / f"{node.name}.toml")
        assert type(read[node.name]) is MODELS[node.role]
    assert {str(read[name].control.coordinator) for name in ("agg0", "worker3")} == {
        str(read["ps"].control.listen)
    }
    assert read["worker3"].local.socket == str(tmp_path / "worker3.sock")
    assert {config.impair.drop for config in read.values()} == {impair}
    assert len({config.impair.seed for config in read.values()}) == len(nodes)
    assert read["ps"].topology.fabric("ps") == topology(nodes)
    assert topology(nodes).trees(["worker0", "worker3"])[0].parents["worker3"] == "agg1"


def test_servers_beside_the_first_follow_it_and_keep_keys_as_well(tmp_path):
    texts = configurations(tmp_path, keyed(3), 0.0, seed=9, system="zebra")
    read = {name: tomllib.loads(text) for name, text in texts.items()}
    assert read["ps"]["topology"]["roots"] == ["ps", "ps1", "ps2"]
    assert "topology" not in read["ps1"]
    followed = {read[name]["control"]["coordinator"] for name in ("ps1", "ps2", "switch0")}
    assert followed == {read["ps"]["control"]["listen"]}
    assert read["switch0"]["switch"]["recirculations"] == 19


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ([("ps", None), ("worker0", "agg0")], "'agg0', which does not exist"),
        ([("ps", None), ("worker0", "ps"), ("worker1", "worker0")], "'worker0', which is a worker"),
        ([("ps", None), ("agg0", "agg1"), ("agg1", "agg0"), ("worker0", "ps")], "circle"),
        ([("ps", None), ("ps2", None), ("worker0", "ps")], "2 PS; a fabric has one"),
        ([("ps", None), ("worker0", "ps"), ("worker0", "ps")], "'worker0' stands there twice"),
        ([("ps", None), ("worker0", None)], "'worker0': the PS, and nobody else, has no parent"),
        ([("ps", None), ("router0", "ps")], "'router0': names start with worker, agg, switch, ps"),
    ],
)
def test_what_is_no_tree_is_refused_before_anything_starts(nodes, complaint):
    with pytest.raises(ValueError, match=complaint):
        Fabric(topology=nodes)


def test_any_tree_is_taken():
    nodes = [("ps", None), ("agg0", "ps"), ("agg1", "agg0"), ("worker0", "agg1"), ("worker1", "ps")]
    fabric = Fabric(topology=nodes)
    assert fabric.topology.ancestors(0, "worker0") == ("agg1", "agg0", "ps")
    assert topology([NodeSpec("ps", None), NodeSpec("worker0", "ps")]).roots == ("ps",)


@pytest.mark.parametrize(("workers", "aggregators"), [(1, 2), (3, 2), (16, 2), (2, 0)])
def test_workers_are_spread_evenly(workers, aggregators):
    nodes = two_level(workers, aggregators)
    below = [sum(node.parent == f"agg{k}" for node in nodes) for k in range(aggregators)]
    assert sum(below) == (workers if aggregators else 0)
    assert max(below, default=0) - min(below, default=0) <= 1
    assert STANDIN.exists()
