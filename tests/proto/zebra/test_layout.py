"""Placement by heat and Algorithm 1, against the algorithm as it is printed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.proto.zebra.layout import at_random, by_heat, in_sequence, orchestrate
from inanet.proto.zebra.store import KeyIndex

from .rig import passes


def printed(register: list[int], capacity: int) -> list[list[int]]:
    """Algorithm 1 line by line: packets of positions in ``register``."""
    packets: list[list[int]] = [[] for _ in range(-(-len(register) // capacity))]
    left: list[int] = []
    for i, k in enumerate(register):
        for packet in packets:
            if len(packet) < capacity and all(register[j] != k for j in packet):
                packet.append(i)
                break
        else:
            left.append(i)
    return packets + [left[i : i + capacity] for i in range(0, len(left), capacity)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 7))
def test_packets_are_those_of_the_printed_algorithm(register: list[int], capacity: int) -> None:
    order, counts = orchestrate(np.array(register, np.int64), 7, capacity)
    assert [x.tolist() for x in np.split(order, np.cumsum(counts)[:-1])] == (
        printed(register, capacity) or [[]]
    )
    assert counts.sum() == len(register)


def test_rank_i_plus_m_j_lies_in_register_i() -> None:
    layout = by_heat(10, 4)
    assert layout.register.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert layout.slot.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert layout.depth == 3
    places = at_random(10, 4, np.random.default_rng(0)).position
    assert len(set(places.tolist())) == 10
    with pytest.raises(ValueError, match="one register"):
        by_heat(1, 0)


def test_a_packet_passes_once_for_each_parameter_of_its_fullest_register() -> None:
    assert passes(np.array([0, 0, 1, 2, 2, 2]), np.array([3, 3, 0]), 3).tolist() == [2, 3, 1]
    assert in_sequence(7, 3).tolist() == [3, 3, 1]


def test_an_index_keeps_its_numbers_while_it_grows() -> None:
    rng = np.random.default_rng(1)
    keys = np.unique(rng.integers(0, 2**64, 5000, np.uint64, endpoint=False))
    index = KeyIndex()
    first = index.add(keys[:100])
    assert first.tolist() == list(range(100))
    assert index.add(keys).tolist() == list(range(len(keys)))
    assert index.find(np.array([*keys[:3], 7], np.uint64)).tolist() == [0, 1, 2, -1]
    assert (index.keys() == keys).all()
