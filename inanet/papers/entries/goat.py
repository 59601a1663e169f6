"""Figures and tables of the GOAT paper."""

from inanet.papers.entries.entry import Entry

_GOAT_SCALE = (
    "the paper's: leaf-spine of 20 switches and 50 servers, fat-tree of 80 and 192, a fifth programmable with "
    "64 MB, 221 MB per worker; means over three seeded placements"
)
_GOAT_TESTBED_SCALE = "the paper's testbed with rates, gradients and memory divided by 1000, in virtual time; hosts cost nothing"
ENTRIES = (
    Entry(
        "goat-fig2",
        "GOAT",
        "Fig. 2",
        "worked example: 3 fragments of 4 workers through 3 switches with one slot each",
        "the paper's",
        "inanet.papers.goat_example:run",
    ),
    Entry(
        "goat-fig5",
        "GOAT",
        "Fig. 5",
        "throughput of 8 workers under 3 switches, six models",
        _GOAT_TESTBED_SCALE,
        "inanet.papers.goat_testbed:models",
    ),
    Entry(
        "goat-fig6",
        "GOAT",
        "Fig. 6",
        "throughput under 3 switches against workers",
        _GOAT_TESTBED_SCALE,
        "inanet.papers.goat_testbed:growth",
    ),
    Entry(
        "goat-fig8",
        "GOAT",
        "Fig. 8",
        "time of an iteration under 3 switches against workers",
        _GOAT_TESTBED_SCALE,
        "inanet.papers.goat_testbed:epochs",
    ),
    Entry(
        "goat-fig9",
        "GOAT",
        "Fig. 9",
        "time of communication under 3 switches against workers",
        _GOAT_TESTBED_SCALE,
        "inanet.papers.goat_testbed:communication",
    ),
    Entry(
        "goat-fig10",
        "GOAT",
        "Fig. 10",
        "bytes that reach the PS under 3 switches against workers",
        _GOAT_TESTBED_SCALE,
        "inanet.papers.goat_testbed:at_the_ps",
    ),
    Entry(
        "goat-fig10-live",
        "GOAT",
        "Fig. 10",
        "the same on real daemons: 8 workers and 3 ina-switch in namespaces",
        "measured on this machine; 100 Mbit/s instead of 100 Gbit/s, 131 kB a round; needs root",
        "inanet.papers.goat_live:fig10",
        measured=True,
    ),
    Entry(
        "goat-fig11",
        "GOAT",
        "Fig. 11",
        "throughput of synchronous, K-SGD and asynchronous training against workers",
        "timing model: the paper's epochs of 2.1 s with latencies in [0, 1] s, 200 epochs",
        "inanet.papers.goat_async:throughput",
    ),
    Entry(
        "goat-fig12",
        "GOAT",
        "Fig. 12",
        "time of 200 epochs, and to a loss, of synchronous, K-SGD and asynchronous training",
        "timing model as for Fig. 11; a softmax regression instead of ResNet",
        "inanet.papers.goat_async:time_to_loss",
    ),
    Entry(
        "goat-fig13",
        "GOAT",
        "Fig. 13",
        "bytes at the PS that nothing has aggregated",
        _GOAT_SCALE,
        "inanet.papers.goat_simulation:at_the_ps",
    ),
    Entry(
        "goat-fig14",
        "GOAT",
        "Fig. 14",
        "bytes that switches take off the PS",
        _GOAT_SCALE,
        "inanet.papers.goat_simulation:in_network",
    ),
    Entry(
        "goat-fig15",
        "GOAT",
        "Fig. 15",
        "bytes times links, against workers",
        _GOAT_SCALE,
        "inanet.papers.goat_simulation:overhead",
    ),
    Entry(
        "goat-fig16",
        "GOAT",
        "Fig. 16",
        "bytes times links, against the deviation of sending rates",
        _GOAT_SCALE,
        "inanet.papers.goat_simulation:deviation",
    ),
)
