"""The systems on a switch, each in a job of its own beside the others, through real daemons over UDP."""

import functools
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import inanet
from inanet.cli.coordinators import Target
from inanet.cli.status import lines
from inanet.errors import FabricError, InaError, RoundTimeout, WorkerLostError
from inanet.launch.fabric import Fabric, daemon_command
from inanet.launch.process import python, python_environment
from inanet.launch.topology import NodeSpec
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.store import Adagrad
from inanet.sparse.group import sparse_group
from tests.client.agent import run_all
from tests.daemons import ranks
from tests.sparse.test_group import KEYS, gradients

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SYSTEMS = ("switchml", "atp", "esa", "a2tp", "netreduce")
HOSTS = 2
PATIENCE = 60.0
FLOATS = TensorSpec("g", "f32", (3001,), "sum", ExponentMode.CARRIED)


MANAGER = """
[node]
name = "manager"
[log]
format = "plain"
[control]
listen = "unix:{directory}/control.sock"
# a machine that compiles kernels beside this test must not look dead
heartbeat = "3 s"
[fabric]
expect = ["ps", "switch0", "worker0", "worker1"]
"""


class Managed(Fabric):
    """A fabric whose coordinator is a manager; it is started with the PS, which waits for it."""

    def __init__(self) -> None:
        super().__init__(HOSTS, system="switchml", command=self._managed)

    def _managed(self, node: NodeSpec, config: Path) -> Sequence[str]:
        if node.role == "ps":
            file = self.directory / "manager.toml"
            file.write_text(MANAGER.format(directory=self.directory))
            self.spawn("manager", python("daemons.manager", "--config", str(file)), python_environment())
            config.write_text(
                f'[node]\nname = "{node.name}"\nlisten = "127.0.0.1:0"\nmodels = "models"\n[log]\nformat = "plain"\n'
                f'[control]\ncoordinator = "unix:{self.directory}/control.sock"\n'
            )
        return with_all_programs(node, config)


def with_all_programs(node: NodeSpec, config: Path) -> Sequence[str]:
    """The daemon's command; the switch runs all systems instead of one."""
    if node.role == "switch":
        # the registers are full with five systems
        more = {
            "netreduce": ", rings = 2",
            "esa": ', memory = "3 MB"',
            "zebra": ', memory = "1 MB"',
        }
        entries = "".join(
            f'    {{ system = "{name}", udp_ports = "0"{more.get(name, "")} }},\n'
            for name in (*SYSTEMS, "zebra")
        )
        text, count = re.subn(r"    \{ system = .*\n", entries, config.read_text())
        assert count == 1
        config.write_text(text)
    return daemon_command(node, config)


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    """Nodes register with a manager, the switch among them, and jobs find it there."""
    with Managed() as running:
        yield running


def join(fabric: Fabric, stack: ExitStack, system: str, name: str = "") -> list[inanet.Job]:
    def connect(rank: int) -> inanet.Job:
        socket = fabric.worker_socket(rank)
        return inanet.connect(
            name or system,
            rank=rank,
            world=HOSTS,
            local_world=1,
            socket=socket,
            system=system,
            timeout=PATIENCE,
        )

    return [stack.enter_context(job) for job in run_all(connect, HOSTS)]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_gives_the_bits_of_a_single_host(fabric: Fabric, system: str) -> None:
    reference = LocalTensor(FLOATS, HOSTS)
    with ExitStack() as stack:
        jobs = join(fabric, stack, system)
        # the first agrees on exponents beforehand, the second carries them over
        for seed in (1, 2):
            generator = np.random.default_rng(seed)
            arrays = [generator.standard_normal(3001).astype(np.float32) for _ in jobs]
            expected = [array.copy() for array in arrays]
            assert reference.reduce(expected) is None
            handles = [
                job.all_reduce_async(array, name="g", mode="carried")
                for job, array in zip(jobs, arrays, strict=True)
            ]
            for handle, array in zip(handles, arrays, strict=True):
                handle.wait(PATIENCE)
                np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))
        run_all(lambda rank: jobs[rank].barrier(), HOSTS)
        assert jobs[0].stats()["leaf_contributions"] > 0


def test_two_jobs_of_netreduce_sum_at_once_and_share_nothing(fabric: Fabric) -> None:
    """Two tenants' rings in one switch program, rounds of both on their way at the same time."""
    with ExitStack() as stack:
        several = [join(fabric, stack, "netreduce", name) for name in ("one", "other")]
        rounds = []
        for seed, jobs in enumerate(several):
            generator = np.random.default_rng(seed)
            for number in range(3):
                arrays = [generator.integers(-(2**20), 2**20, 20_001, np.int32) for _ in jobs]
                expected = sum(arrays[1:], arrays[0].copy())
                handles = [
                    job.all_reduce_async(array, name=f"t{number}")
                    for job, array in zip(jobs, arrays, strict=True)
                ]
                rounds.append((handles, arrays, expected))
        for handles, arrays, expected in rounds:
            for handle, array in zip(handles, arrays, strict=True):
                handle.wait(PATIENCE)
                np.testing.assert_array_equal(array, expected)
        for jobs in several:
            run_all(lambda rank, jobs=jobs: jobs[rank].barrier(), HOSTS)
            assert jobs[0].stats()["leaf_contributions"] > 0


def test_ranks_of_a_host_have_a_ring_each_where_the_switch_offers_it(fabric: Fabric) -> None:
    """Parallel NetReduce: the agents sum pieces over their ranks' shared memory, each piece has a ring of its own."""
    each = 2
    with ExitStack() as stack:

        def connect(rank: int) -> inanet.Job:
            socket = fabric.worker_socket(rank // each)
            places = {"rank": rank, "world": HOSTS * each, "local_world": each}
            return inanet.connect("ranks", **places, socket=socket, system="netreduce", timeout=PATIENCE)

        jobs = [stack.enter_context(job) for job in run_all(connect, HOSTS * each)]
        generator = np.random.default_rng(3)
        arrays = [generator.standard_normal(3001).astype(np.float32) for _ in jobs]
        expected = [array.copy() for array in arrays]
        assert LocalTensor(FLOATS, len(jobs)).reduce(expected) is None
        handles = [
            job.all_reduce_async(array, name="g", mode="carried")
            for job, array in zip(jobs, arrays, strict=True)
        ]
        for handle, array in zip(handles, arrays, strict=True):
            handle.wait(PATIENCE)
            np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))
    assert "netreduce on switch 'switch0' in 2 rings" in (fabric.directory / "manager.log").read_text()


def test_ranks_of_a_sparse_job_find_the_daemons_and_get_the_bits_of_a_group(fabric: Fabric) -> None:
    with ExitStack() as stack:
        members = ranks.joined(fabric, stack, "clicks")
        group = stack.enter_context(sparse_group(2, 1, width=2, optimiser=Adagrad(0.1)))
        group.use_hot(KEYS[:100])
        for seed in range(3):
            pushes = gradients(2, seed)
            group.push_all(pushes)
            expected = group.jobs[0].pull(KEYS)
            for rows in run_all(lambda rank: members[rank].job.push_pull(*pushes[rank], KEYS), 2):  # noqa: B023
                np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))
        shown = "\n".join(lines(Target(f"unix:{fabric.directory}/control.sock").ask(PATIENCE)))
        assert "job clicks: running" in shown
        assert re.search(r"switch0\n +\S+-0\n +\S+-1", shown), shown


def test_keys_become_hot_while_daemons_train_with_the_bits_of_a_group(fabric: Fabric) -> None:
    online = Online(after=3, threshold=0.1, memory=2400, step=5)
    more = "online = { after = 3, threshold = 0.1, memory = 2400, step = 5 }"
    with ExitStack() as stack:
        members = ranks.joined(fabric, stack, "moving", more)
        group = stack.enter_context(sparse_group(2, 1, width=2, optimiser=Adagrad(0.1), online=online))
        group.use_hot(KEYS[:100])
        for seed in range(12):
            rng = np.random.default_rng(seed)
            heat = 1 / (1 + (np.arange(len(KEYS)) + 60 * (seed > 4)) % len(KEYS))
            pushes = [
                (np.sort(keys), rng.standard_normal((50, 2)).astype(np.float32))
                for keys in (rng.choice(KEYS, 50, replace=False, p=heat / heat.sum()) for _ in range(2))
            ]
            group.push_all(pushes)
            expected = group.jobs[0].pull(KEYS)
            for rows in run_all(lambda rank: members[rank].job.push_pull(*pushes[rank], KEYS), 2):  # noqa: B023
                np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))
        assert members[1].worker.hot.version == group.workers[0].hot.version > 2
        assert members[1].worker.hot.keys.tolist() == group.workers[0].hot.keys.tolist()


def test_a_model_is_kept_for_the_next_job(fabric: Fabric) -> None:
    with sparse_group(2, 1, width=2, optimiser=Adagrad(0.1)) as group:
        group.use_hot(KEYS[:100])
        for job in range(2):
            with ExitStack() as stack:
                members = ranks.joined(fabric, stack, f"kept{job}", 'model = "clicks"')
                assert [member.began for member in members] == [2 * job] * 2
                for seed in (2 * job, 2 * job + 1):
                    pushes = gradients(2, seed)
                    group.push_all(pushes)
                    expected = group.jobs[0].pull(KEYS)
                    for rows in run_all(lambda rank: members[rank].job.push_pull(*pushes[rank], KEYS), 2):  # noqa: B023
                        np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))
    assert [path.name for path in (fabric.directory / "models").iterdir() if path.suffix == ".state"] == [
        "clicks.0of1.state"
    ]


def test_a_rank_that_is_killed_or_fails_is_an_error_with_its_number_for_the_others(fabric: Fabric) -> None:
    file = ranks.job_file(fabric, "killed")
    with ranks.stranger(fabric, "killed") as other, inanet.join_sparse(file, 0) as member:
        assert other.stdout is not None
        assert other.stdout.readline() == b"joined\n"
        other.kill()
        with pytest.raises(WorkerLostError, match=r"rank 1 \(host \S+-1\) was lost") as caught:
            member.job.push(KEYS, np.ones((len(KEYS), 2), np.float32))
        assert caught.value.ranks == (1,)
    with ExitStack() as stack:
        members = ranks.joined(fabric, stack, "failed")
        with pytest.raises(RoundTimeout, match=r"job 'failed', rank 0, round 1: not finished after 0 s"):
            members[0].job.push(KEYS, np.ones((len(KEYS), 2), np.float32), timeout=0.0)
        with pytest.raises(ZeroDivisionError), members[1]:
            raise ZeroDivisionError
        with pytest.raises(WorkerLostError, match=r"rank 1 \(host \S+-1\) was lost"):
            members[0].job.push(KEYS, np.ones((len(KEYS), 2), np.float32))


def test_jobs_side_by_side_and_a_lost_switch_is_one_error_for_all(fabric: Fabric) -> None:
    with ExitStack() as stack:
        sparse = ranks.joined(fabric, stack, "clicks")
        several = [join(fabric, stack, system) for system in ("switchml", "a2tp", "netreduce")]
        rounds = [
            jobs[0].all_reduce_async(np.ones(100, np.float32), name=f"g{index}")
            for index, jobs in enumerate(several)
        ]
        fabric.processes["switch0"].kill()
        # whoever has not called anything yet learns it as well
        for index, (jobs, handle) in enumerate(zip(several, rounds, strict=True)):
            errors: list[str] = []

            def fail(action: object, into: list[str] = errors) -> None:
                with pytest.raises(InaError) as caught:
                    action()  # type: ignore[operator]
                into.append(caught.value.reason)

            waiting = threading.Thread(target=fail, args=(lambda handle=handle: handle.wait(PATIENCE),))
            waiting.start()
            # the same tensor as rank 0's: nobody may have seen the loss yet
            late = functools.partial(jobs[1].all_reduce, name=f"g{index}", timeout=PATIENCE)
            fail(lambda late=late: late(np.ones(100, np.float32)))
            waiting.join(PATIENCE)
            assert len(errors) == HOSTS
            assert all("switch 'switch0' was lost" in error for error in errors), errors
        for member in sparse:
            with pytest.raises(FabricError, match="switch 'switch0' was lost"):
                member.job.push(KEYS, np.ones((len(KEYS), 2), np.float32), timeout=PATIENCE)
