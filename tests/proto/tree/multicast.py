"""What tests of results by multicast share: rounds that take a while, and their bits by unicast."""

import functools

from inanet.testing.fabric import VirtualFabric, float_arrays
from tests.proto.tree.test_rounds import ONE_EACH, STAR, spec_of

COUNT = 256 * 1100 + 77
#: data fragments of a round; its exponents fit into two more
FRAGMENTS = 1101
EIGHT = {"ps": None} | {f"w{i}": "ps" for i in range(8)}
EIGHT_EACH = {f"w{i}": [i] for i in range(8)}


def run_rounds(fabric, rounds=2, ranks=4, count=COUNT):
    results = []
    for round_ in range(rounds):
        arrays = float_arrays(count, ranks, seed=round_)
        fabric.all_reduce(spec_of(count), arrays)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    return results


@functools.cache
def by_unicast(ranks=4):
    parents, each = (STAR, ONE_EACH) if ranks == 4 else (EIGHT, EIGHT_EACH)
    return run_rounds(VirtualFabric(parents, each), ranks=ranks)


def groups_joined(fabric, name):
    return fabric.network.groups_of(fabric.network.device(fabric.devices[name].endpoint))
