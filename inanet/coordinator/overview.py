"""What a coordinator shows to whoever asks: nodes, jobs, trees, and what is still waited for."""

from collections.abc import Mapping

from inanet.coordinator.admission import Admission, Forming
from inanet.coordinator.job import Job
from inanet.coordinator.registry import Registry
from inanet.messages.control import Hello
from inanet.messages.registration import JobState, Overview
from inanet.messages.text import clip


def overview(
    registry: Registry,
    serving: Mapping[str, Hello],
    jobs: Mapping[int, Job],
    admission: Admission,
    expected: tuple[str, ...],
    now: float,
) -> Overview:
    """The answer to a :class:`~inanet.messages.registration.Query`."""
    running = [_running(job) for job in jobs.values()]
    waiting = []
    for pending, missing in admission.pending(now):
        members = pending.members
        waiting.append(
            JobState(
                name=members.job,
                state="forming" if isinstance(pending, Forming) else "resuming",
                epoch=pending.epoch,
                world=members.world,
                ranks={name: tuple(sorted(hello.ranks)) for name, hello in members.hellos.items()},
                missing=tuple(clip(words) for words in missing),
            )
        )
    return Overview(
        epoch=admission.epoch,
        nodes=registry.states(serving, now),
        jobs=(*running, *waiting),
        missing=registry.missing(expected),
    )


def _running(job: Job) -> JobState:
    trees = job.plans.current.trees
    return JobState(
        name=job.name,
        state="running",
        epoch=job.epoch,
        version=job.plans.current.version,
        rounds=job.rounds.ledger.newest,
        # those it was started with: it may go on without some
        world=max((job.plans.hellos[name].world for name in job.hosts), default=job.plans.current.ranks),
        ranks={name: host.ranks for name, host in job.hosts.items()},
        roots=tuple(tree.root for tree in trees),
        trees=tuple(dict(tree.parents) for tree in trees),
        absent=tuple(sorted(job.plans.absent)),
    )
