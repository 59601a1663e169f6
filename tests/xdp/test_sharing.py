"""Several processors and user space on the same slots at once: nothing is lost, counted twice or torn."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from inanet.proto.tree.engine import open_round
from inanet.proto.tree.slots import ShardColumn, State
from inanet.wire.drops import Drop
from inanet.xdp.gate import Gate
from inanet.xdp.memory import SharedMemory
from tests.xdp.conftest import CHILDREN, DROP, PASS, frame
from tests.xdp.test_golden import Side
from tests.xdp.test_leaving import LIVE, contribution

pytestmark = pytest.mark.privileged("loads BPF programs")

FRAGMENTS = 60


def test_all_children_at_once_in_the_same_slots(shared: Callable[..., SharedMemory]) -> None:
    memory = shared(1600, "native")
    side = Side(memory, root=False)
    memory.tables["routes"][0]["credit_mask"] = (1 << 62) - 1
    program = memory.program("native")
    gate = Gate(memory)
    frames = {
        child: [
            frame(contribution(child, fragment, 1 << child), CHILDREN[child]) for fragment in range(FRAGMENTS)
        ]
        for child in LIVE
    }
    unhandled: dict[int, list[int]] = {child: [] for child in LIVE}
    start = threading.Barrier(len(LIVE) + 1)

    def send(child: int) -> None:
        start.wait()
        # every packet twice: one of them is a duplicate
        for fragment in [*range(FRAGMENTS), *range(FRAGMENTS)]:
            verdict, _, _ = program.test_run(frames[child][fragment])
            assert verdict in (DROP, PASS)
            if verdict == PASS:
                unhandled[child].append(fragment)

    threads = [threading.Thread(target=send, args=(child,)) for child in LIVE]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        with gate:
            assert not memory.tables["busy"]["inside"].any()
            before = memory.rows.sum(dtype=np.int64)
            assert memory.rows.sum(dtype=np.int64) == before
    for thread in threads:
        thread.join()
    # what came while the gate was closed is user space's
    for child, fragments in unhandled.items():
        for fragment in fragments:
            side.ingest(contribution(child, fragment, 1 << child), CHILDREN[child])
    slot = int(memory.shards[side.row, ShardColumn.SLOT0])
    assert (memory.rows[slot : slot + FRAGMENTS, 6:262] == sum(1 << child for child in LIVE)).all()
    assert (memory.state[slot : slot + FRAGMENTS] == State.SENT).all()
    assert memory.shards[side.row, ShardColumn.UP_LOGGED] == FRAGMENTS
    assert sorted(memory.up_log[slot : slot + FRAGMENTS].tolist()) == list(range(FRAGMENTS))
    assert int(memory.up_left[memory.shards[side.row, ShardColumn.GROUP0]]) == 1024 - FRAGMENTS
    taken = side.counts + memory.kernel_counts()[: len(side.counts)]
    assert taken[:2].tolist() == [FRAGMENTS * len(LIVE), FRAGMENTS]


def test_a_gate_inside_a_gate(shared: Callable[..., SharedMemory]) -> None:
    memory = shared(16, "native")
    gate = Gate(memory)
    with gate:
        with gate:
            assert memory.tables["closed"][0] == 1
        assert memory.tables["closed"][0] == 1
    assert memory.tables["closed"][0] == 0
    memory.tables["woken"] = 1
    gate.awake()
    assert memory.tables["woken"][0] == 0


def test_waiting_for_the_program_has_an_end(
    shared: Callable[..., SharedMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = shared(16, "native")
    monkeypatch.setattr("inanet.xdp.gate._TURNS", 3)
    memory.tables["busy"][0, 0]["inside"] = 1
    with pytest.raises(RuntimeError, match="does not leave the tables"), Gate(memory):
        pass
    assert memory.tables["closed"][0] == 0


def test_rounds_of_thousands_of_groups_open(shared: Callable[..., SharedMemory]) -> None:
    memory = shared(150_000, "generic")
    side = Side(memory, root=False)
    row = memory.add_shard(7, 11, 0, 0, 140_001, 40)
    packet = contribution(0, 140_000, 1, shard=11)
    assert memory.program("generic").test_run(frame(packet, CHILDREN[0]))[0] == DROP
    group = int(memory.shards[row, ShardColumn.GROUP0])
    opened = memory.up_left[group : group + 137].tolist()
    open_round(side.tables, row, 42)
    assert memory.up_left[group : group + 137].tolist() == opened == [1024] * 136 + [140_001 - 136 * 1024]


def test_a_round_that_another_processor_is_opening_is_not_over(shared: Callable[..., SharedMemory]) -> None:
    memory = shared(1600, "native")
    side = Side(memory, root=False)
    locks, key = memory.object.map("shard_locks"), side.row.to_bytes(4, "little")
    shard = memory.shards[side.row]
    # as it stands between the two stores that open it, with the lock held
    shard[ShardColumn.ACTIVE], shard[ShardColumn.COMMITTED] = 42, 1
    locks.put(key, (1).to_bytes(8, "little"))
    packet = frame(contribution(0, 3, 1, round=42), CHILDREN[0])
    assert memory.program("native").test_run(packet)[0] == PASS
    # now it is open
    shard[ShardColumn.COMMITTED] = 0
    locks.put(key, bytes(8))
    assert memory.program("native").test_run(packet)[0] == DROP
    assert memory.bitmap[int(shard[ShardColumn.SLOT0]) + 3] == 1
    assert not memory.kernel_drops()[Drop.STALE_ROUND]
    # and now it is over
    shard[ShardColumn.COMMITTED] = 1
    assert memory.program("native").test_run(packet)[0] == DROP
    assert memory.kernel_drops()[Drop.STALE_ROUND] == 1
