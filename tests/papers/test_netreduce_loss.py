"""A few steps of Fig. 12's training: what differs is the order and the rounding of sums, and nothing else."""

import json

import numpy as np
import pytest

from inanet.papers import netreduce_loss
from inanet.papers.netreduce_loss import DataMissing, differences, fig12, train
from inanet.papers.registry import find, report


def test_losses_are_the_rings_but_for_the_last_bits() -> None:
    pytest.importorskip("sklearn", reason="the demo extra is not installed")
    outcome = fig12(3)
    # what the command prints
    json.dumps(report(find("netreduce-fig12"), outcome, True))
    by_name = {claim.name: claim for claim in outcome.claims}
    for way in ("netreduce", "netreduce-int32"):
        claim = by_name[f"{way}: largest difference of losses, per cent"]
        assert claim.holds
        assert claim.ours < 1e-3
    # three steps are too few to learn much
    assert not by_name["loss of the ring's last step, of its first"].holds
    losses, accuracy = train("netreduce", 3)
    assert losses[0] > losses[1] > losses[2]
    assert 0.1 < accuracy < 1


def test_the_metric_is_a_share_of_the_rings_loss() -> None:
    np.testing.assert_allclose(differences(np.array([2.0, 0.5]), np.array([1.0, 1.0])), [100, 50])


def test_without_digits_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("sklearn")

    netreduce_loss._digits.cache_clear()
    monkeypatch.setattr(netreduce_loss, "fetch", missing)
    with pytest.raises(DataMissing, match=r"inanet\[demo\]"):
        train("ring", 1)
    netreduce_loss._digits.cache_clear()
