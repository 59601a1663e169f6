"""The network does not depend on how a file lists it."""

import random

import pytest

from inanet.planning.network import Network, Port

TRUNKS = {
    ("s0", "s2"): 1.0,
    ("s0", "s3"): 2.0,
    ("s1", "s2"): 3.0,
    ("s1", "s3"): 4.0,
    ("s2", "s4"): 5.0,
    ("s3", "s4"): 6.0,
}
PORTS = {f"h{i}": Port(f"s{i % 2}", 1.0, 1.0) for i in range(6)} | {"root": Port("s4", 1.0, 1.0)}


def shuffled(seed: int) -> Network:
    rng = random.Random(seed)
    trunks = [(ends if rng.random() < 0.5 else ends[::-1], rate) for ends, rate in TRUNKS.items()]
    ports = list(PORTS.items())
    rng.shuffle(trunks)
    rng.shuffle(ports)
    return Network(dict(ports), dict(trunks))


@pytest.mark.parametrize("seed", range(20))
def test_ways_and_rates_are_the_same_in_any_order(seed: int) -> None:
    plain, other = Network(PORTS, TRUNKS), shuffled(seed)
    assert plain.limits() == other.limits()
    for source in PORTS:
        for target in PORTS:
            for flow in range(4):
                assert plain.path(source, target, flow) == other.path(source, target, flow)
        assert set(plain.spread(source, PORTS)) == set(other.spread(source, PORTS))
