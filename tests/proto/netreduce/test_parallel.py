"""Several ranks on every host: all patterns of section 3.4, bit for bit, with and without loss."""

import numpy as np
import pytest

from inanet.proto.common.events import Refused, RoundDone
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.parallel import Part, RankHost, cut, members, parts
from inanet.proto.netreduce.ring import Member, Sizes
from inanet.proto.netreduce.worker import NetReduceWorker
from inanet.proto.roce import Attributes
from inanet.testing.ranks import RankFabric
from inanet.wire.batch import PacketBatch

OPTIONS = {"sizes": Sizes(length=6, packet_bytes=256), "attributes": Attributes(path_mtu=256)}
IMPAIRED = {"drop": 0.05, "duplicate": 0.05, "reorder": 0.05, "corrupt": 0.05}
PATTERNS = ["parallel-netreduce", "parallel-ring", "tencent", "flat-ring"]


def fabric(pattern, hosts=3, each=2, **options) -> RankFabric:
    return RankFabric(pattern, hosts, each, options=OPTIONS, **options)


def floats(hosts: int, each: int, elements: int, seed: int = 5) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        [(rng.standard_normal(elements) * 2.0 ** rng.integers(-8, 8)).astype(np.float32) for _ in range(each)]
        for _ in range(hosts)
    ]


def spec(elements: int, dtype: str = "f32", op: str = "sum") -> TensorSpec:
    mode = ExponentMode.NONE if dtype == "i32" else ExponentMode.PROLOGUE
    return TensorSpec("t", dtype, (elements,), op, mode)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("impair", [None, IMPAIRED])
def test_every_rank_gets_the_bits_of_one_host_with_all_ranks(pattern, impair):
    what = spec(3000 if impair is None else 1000, op="mean")
    arrays = floats(3, 2, what.elements)
    expected = [array.copy() for host in arrays for array in host]
    assert LocalTensor(what, 6).reduce(expected) is None
    rig = fabric(pattern, impair=impair)
    assert all(isinstance(event, RoundDone) for event in rig.reduce(what, arrays))
    for host in arrays:
        for array in host:
            assert array.tobytes() == expected[0].tobytes()
    assert (rig.stats()["switch 1"].get("completed", 0) > 0) is (pattern == "parallel-netreduce")


def test_rings_carry_a_piece_each_and_rounds_follow_each_other():
    rig = fabric("parallel-netreduce", hosts=2, each=4)
    for round_ in (1, 2, 3):
        rng = np.random.default_rng(round_)
        arrays = [list(rng.integers(-(2**20), 2**20, (4, 8000), np.int32)) for _ in range(2)]
        expected = sum(array for host in arrays for array in host)
        rig.reduce(spec(8000, "i32"), arrays, round_)
        for host in arrays:
            for array in host:
                np.testing.assert_array_equal(array, expected)
    # a quarter of 8000 values for every ring, in messages of six packets of 256 bytes
    sent = {part.worker.member.ring: part.worker.stats()["messages_sent"] for part in rig.ranks[0].parts}
    assert sent.keys() == {1, 2, 3, 4}
    assert max(sent.values()) - min(sent.values()) <= 3


def test_raw_floats_are_those_of_the_pieces_ranks():
    arrays = floats(2, 2, 2000)
    expected = (arrays[0][0] + arrays[0][1]) + (arrays[1][0] + arrays[1][1])
    rig = fabric("parallel-netreduce", hosts=2, raw=True)
    rig.reduce(spec(2000), arrays)
    assert {array.tobytes() for host in arrays for array in host} == {expected.tobytes()}


@pytest.mark.parametrize("pattern", ["parallel-netreduce", "flat-ring"])
def test_a_nan_is_told_by_rank_and_element_of_the_whole_tensor(pattern):
    arrays = floats(2, 2, 3000)
    arrays[1][1][2700] = np.nan
    ends = fabric(pattern, hosts=2).reduce(spec(3000), arrays)
    assert all(isinstance(event, Refused) for event in ends)
    assert {(event.local_rank, event.index) for event in ends if event.local_rank >= 0} == {(1, 2700)}


def test_small_tensors_leave_rings_without_a_piece():
    assert cut(spec(300), 8, 4) == [(0, 0), (0, 256), (256, 256), (256, 300)]
    whole = cut(spec(5000), 8, 3)
    assert [low % 256 for low, _ in whole] == [0, 0, 0]
    assert (whole[0][0], whole[-1][1]) == (0, 5000)
    arrays = [[np.full(5, host * 4 + rank, np.int32) for rank in range(4)] for host in range(2)]
    fabric("parallel-netreduce", hosts=2, each=4).reduce(spec(5, "i32"), arrays)
    assert all((array == 28).all() for host in arrays for array in host)


def test_places_on_rings():
    assert [
        (one.ring, one.rank, one.hosts, one.mode) for one in members("parallel-netreduce", 1, 7, 2, 4, 3)
    ] == [
        (7, 2, 4, "switch"),
        (8, 2, 4, "switch"),
        (9, 2, 4, "switch"),
    ]
    assert [(one.ring, one.rank, one.hosts, one.mode) for one in members("flat-ring", 1, 7, 2, 4, 3)] == [
        (7, 6, 12, "ring"),
        (7, 7, 12, "ring"),
        (7, 8, 12, "ring"),
    ]
    (tencent,) = members("tencent", 1, 7, 2, 4, 3)
    assert (tencent.rank, tencent.hosts, tencent.ranks, tencent.mode) == (2, 4, 12, "ring")


def test_what_does_not_fit_is_refused_with_a_sentence():
    rig = fabric("parallel-netreduce", hosts=2)
    host = rig.ranks[0]
    host.add_tensor(0, spec(100))
    with pytest.raises(ValueError, match="1 arrays for 2 ranks"):
        host.begin(0, 1, [np.zeros(100, np.float32)], 0.0)
    with pytest.raises(ValueError, match=r"arrays of \[99, 100\] elements for a tensor of 100"):
        host.begin(0, 1, [np.zeros(100, np.float32), np.zeros(99, np.float32)], 0.0)
    worker = NetReduceWorker(Member(1, 1, 0, 2, 4, mode="switch"), 10 << 40 | 0xC000)
    with pytest.raises(ValueError, match="numbers of its own"):
        RankHost([Part(worker, 0, 2, 0, 2), Part(worker, 0, 2, 1, 2)])
    host.drop_tensor(0)
    with pytest.raises(KeyError):
        host.begin(0, 1, [np.zeros(100, np.float32)] * 2, 0.0)


def test_packets_that_are_nobodys_are_counted_once():
    rig = fabric("parallel-netreduce", hosts=2)
    host = rig.ranks[0]
    arena = np.zeros(200, np.uint8)
    batch = PacketBatch(
        arena, np.array([0, 100], np.int64), np.array([100, 30], np.int64), np.zeros(2, np.uint64)
    )
    host.receive(batch, 0.0)
    assert sum(host.drops_by_reason().values()) == 2
    assert parts("tencent", [part.worker for part in host.parts[:1]], 2) == [
        Part(host.parts[0].worker, 0, 2, 0, 1)
    ]
