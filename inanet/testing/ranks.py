"""Hosts with several ranks in one process and in virtual time, under any pattern of section 3.4 of NetReduce.

>>> fabric = RankFabric("parallel-netreduce", hosts=4, each=2)
>>> fabric.reduce(spec, arrays)      # arrays[host][rank], overwritten with the result
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from inanet.proto.common.events import Refused, RoundDone
from inanet.proto.common.plan import TensorSpec
from inanet.proto.netreduce.parallel import Pattern, RankHost, members, parts
from inanet.proto.netreduce.worker import NetReduceWorker
from inanet.testing.netreduce import RingFabric, connect, host_address


def workers_of(
    pattern: Pattern, hosts: int, each: int, *, raw: bool = False, **options: Any
) -> list[list[NetReduceWorker]]:
    """Workers by host, connected along their rings; ``options`` as of :func:`~inanet.proto.netreduce.parallel.members`."""
    found = []
    for host in range(hosts):
        places = members(pattern, 1, 1, host, hosts, each, **options)
        found.append(
            [
                NetReduceWorker(
                    place,
                    host_address(host) << 16 | 0xC000 + number,
                    numbers=(0x10 + 2 * number, 0x11 + 2 * number),
                    raw=raw,
                )
                for number, place in enumerate(places)
            ]
        )
    for ring in rings_of(pattern, found):
        connect(ring)
    return found


def rings_of(pattern: Pattern, workers: Sequence[Sequence[NetReduceWorker]]) -> list[list[NetReduceWorker]]:
    """The same by ring, in the order of ranks."""
    if pattern == "flat-ring":
        return [[worker for host in workers for worker in host]]
    return [list(ring) for ring in zip(*workers, strict=True)]


class RankFabric(RingFabric):
    """``hosts`` hosts with ``each`` ranks under a pattern, on one switch, which knows rings only where the pattern needs it.

    Keywords are those of :class:`~inanet.testing.netreduce.RingFabric`, and ``options`` of places on rings.
    """

    def __init__(
        self,
        pattern: Pattern,
        hosts: int,
        each: int,
        *,
        raw: bool = False,
        options: dict[str, Any] | None = None,
        **fabric: Any,
    ) -> None:
        super().__init__(hosts, **fabric)
        workers = workers_of(pattern, hosts, each, raw=raw, **(options or {}))
        self.ranks = [RankHost(parts(pattern, mine, each)) for mine in workers]
        if pattern == "parallel-netreduce":
            for ring in rings_of(pattern, workers):
                for address, plan in self.plans(ring).items():
                    self.switches[address].add_ring(plan)
        for host, machine in enumerate(self.ranks):
            # a host is driven as a worker is
            self.workers[host_address(host)].append(machine)  # type: ignore[arg-type]

    def reduce(
        self, spec: TensorSpec, arrays: Sequence[Sequence[NDArray[Any]]], round_: int = 1
    ) -> list[Any]:
        """One round of tensor 0, made known in round 1; returns every host's event of its end."""
        for machine, mine in zip(self.ranks, arrays, strict=True):
            if round_ == 1:
                machine.add_tensor(0, spec)
            machine.begin(0, round_, mine, self.clock.now)
        self.run(lambda: len(self.ends(round_)) == len(self.ranks))
        return self.ends(round_)

    def ends(self, round_: int) -> list[Any]:
        """Events of hosts whose round is over, done or refused."""
        return [
            event for _, event in self.log if isinstance(event, RoundDone | Refused) and event.round == round_
        ]

    def stats(self) -> dict[str, Any]:
        """Counters of switches and hosts."""
        return {
            **{f"switch {address & 0xFF}": program.stats() for address, program in self.switches.items()},
            **{
                f"host {number}": {**machine.stats(), **machine.drops_by_reason()}
                for number, machine in enumerate(self.ranks)
            },
        }
