import numpy as np
import pytest

from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.ring import Member, Sizes
from inanet.proto.roce import Attributes
from inanet.testing.netreduce import RingFabric

SIZES = Sizes(length=6, packet_bytes=256)
MTU = Attributes(path_mtu=256)
IMPAIRED = {"drop": 0.05, "duplicate": 0.05, "reorder": 0.05, "corrupt": 0.05}


def members(hosts: int, *, ring: int = 3, **options) -> list[Member]:
    facts = {"sizes": SIZES, "attributes": MTU} | options
    return [Member(1, ring, rank, hosts, hosts, **facts) for rank in range(hosts)]


def spec(
    elements: int, dtype: str = "i32", mode: ExponentMode = ExponentMode.NONE, op: str = "sum"
) -> TensorSpec:
    return TensorSpec("t", dtype, (elements,), op, mode)


def integers(hosts: int, elements: int = 5000, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(-(2**27), 2**27, (hosts, elements), np.int32))


@pytest.mark.parametrize("hosts", [2, 4])
def test_all_ranks_get_the_sum_through_the_switch(hosts):
    fabric, arrays = RingFabric(hosts), integers(hosts)
    expected = sum(array.astype(np.int64) for array in arrays)
    workers = fabric.add_ring(members(hosts))
    fabric.all_reduce(workers, spec(5000), arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    assert {worker.mode for worker in workers} == {"switch"}


def test_program_off_is_ring_all_reduce_on_the_same_queue_pairs():
    fabric, arrays = RingFabric(4, serving=False), integers(4)
    expected = sum(array.astype(np.int64) for array in arrays)
    workers = fabric.add_ring(members(4))
    fabric.all_reduce(workers, spec(5000), arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    assert {worker.mode for worker in workers} == {"ring"}


@pytest.mark.parametrize("serving", [True, False])
def test_bits_survive_loss_duplication_reordering_and_damage_at_every_hop(serving):
    fabric, arrays = RingFabric(4, impair=IMPAIRED, serving=serving), integers(4)
    expected = sum(array.astype(np.int64) for array in arrays)
    workers = fabric.add_ring(members(4))
    fabric.all_reduce(workers, spec(5000), arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    stats = fabric.stats()
    assert all(stats[f"ring 3 rank {rank}"]["retransmissions"] > 0 for rank in range(4))
    assert (stats["switch 1"]["completed"] > 0) is serving


@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED, ExponentMode.FIXED])
@pytest.mark.parametrize("serving", [True, False])
def test_floats_have_the_bits_of_every_other_system(mode, serving):
    rng = np.random.default_rng(3)
    fabric = RingFabric(3, impair={"drop": 0.03}, serving=serving)
    workers = fabric.add_ring(members(3))
    factor = 2.0**20 if mode is ExponentMode.FIXED else 0.0
    what = TensorSpec("t", "f32", (3000,), "mean", mode, factor)
    for round_ in (1, 2):
        # blocks that outgrow what the first round has left
        scale = np.repeat(2.0 ** rng.integers(-30, 6 * round_, 12), 250)
        arrays = [(rng.standard_normal(3000) * scale).astype(np.float32) for _ in range(3)]
        expected = summed_by_hand(what, arrays) if round_ == 1 or mode is not ExponentMode.CARRIED else None
        exact = np.mean([array.astype(np.float64) for array in arrays], axis=0)
        fabric.all_reduce(workers, what, arrays, round_)
        assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()
        if expected is not None:
            assert arrays[0].tobytes() == expected.tobytes()
        np.testing.assert_allclose(arrays[0], exact, atol=np.abs(exact).max() * 2**-20)


def summed_by_hand(what: TensorSpec, arrays: list[np.ndarray]) -> np.ndarray:
    """One host with all ranks does the same arithmetic (number format)."""
    form = make_format(what, len(arrays))
    copies = [array.copy() for array in arrays]
    table = form.initial_exponents()
    if what.mode is not ExponentMode.FIXED:
        form.exponents(copies, 0, form.fragments, table)
    rows = np.zeros((form.fragments, 263), np.int32)
    needs = form.initial_exponents()
    form.exponents(copies, 0, form.fragments, needs)
    blocks = form.misfits(needs, table)
    table[blocks] = needs[blocks]
    form.encode(copies, 0, form.fragments, table, rows, 0)
    every = np.arange(form.fragments)
    form.decode(rows, every, every, table, copies)
    return copies[0]


def test_raw_floats_are_added_in_the_order_of_ranks():
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal(3000).astype(np.float32) for _ in range(3)]
    expected = (arrays[0] + arrays[1]) + arrays[2]
    fabric = RingFabric(3, impair=IMPAIRED)
    workers = fabric.add_ring(members(3), raw=True)
    fabric.all_reduce(workers, spec(3000, "f32", ExponentMode.PROLOGUE), arrays)
    assert {array.tobytes() for array in arrays} == {expected.tobytes()}
