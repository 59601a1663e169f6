"""Figures and tables of the XAgg paper."""

from inanet.papers.entries.entry import Entry

_XAGG_TESTBED = (
    "seven workers, two servers, a PS and a switch in a lab, rates divided by 100; the larger models by the planner's "
    "model"
)
_XDP_SCALE = "measured on this machine, over a virtual cable instead of 100 Gbit/s cards; needs root and, for sizes, clang"
ENTRIES = (
    Entry(
        "xagg-fig1",
        "XAgg",
        "Fig. 1",
        "worked example: a slow link and a late worker, under a PS, a programmable switch, and XAgg",
        "arithmetic at the paper's size; simulation with sizes and rates divided by 1,000",
        "inanet.papers.xagg_example:run",
    ),
    Entry(
        "xagg-fig6",
        "XAgg",
        "Fig. 6",
        "packets per second of one core against values per packet, the kernel program alone",
        _XDP_SCALE,
        "inanet.papers.xagg_xdp:fig6",
        measured=True,
    ),
    Entry(
        "xagg-fig7",
        "XAgg",
        "Fig. 7",
        "gradient throughput against values per packet, and of a hop beside TCP-Agg",
        _XDP_SCALE,
        "inanet.papers.xagg_xdp:fig7",
        measured=True,
    ),
    Entry(
        "xagg-fig8",
        "XAgg",
        "Fig. 8",
        "throughput of the kernel program alone against cores",
        _XDP_SCALE,
        "inanet.papers.xagg_xdp:fig8",
        measured=True,
    ),
    Entry(
        "xagg-fig9",
        "XAgg",
        "Fig. 9",
        "busy processors against the throughput of a hop in the kernel",
        _XDP_SCALE,
        "inanet.papers.xagg_xdp:fig9",
        measured=True,
    ),
    Entry(
        "xagg-fig10",
        "XAgg",
        "Fig. 10",
        "latency of a hop in the kernel beside TCP-Agg",
        _XDP_SCALE,
        "inanet.papers.xagg_xdp:fig10",
        measured=True,
    ),
    Entry(
        "xagg-fig11",
        "XAgg",
        "Fig. 11",
        "contributions lost against throughput, nothing sent again, and what TCP-Agg sends again",
        _XDP_SCALE,
        "inanet.papers.xagg_xdp:fig11",
        measured=True,
    ),
    Entry(
        "xagg-fig13",
        "XAgg",
        "Fig. 13",
        "communication time of XAgg, TCP-Agg, SwitchML, ring and PS, five models at their sizes",
        _XAGG_TESTBED,
        "inanet.papers.xagg_testbed:fig13",
        measured=True,
    ),
    Entry(
        "xagg-fig14",
        "XAgg",
        "Fig. 14",
        "time of an epoch of VGG16 under the same",
        f"{_XAGG_TESTBED}; computing by the paper's own times",
        "inanet.papers.xagg_testbed:fig14",
        measured=True,
    ),
    Entry(
        "xagg-fig15",
        "XAgg",
        "Fig. 15",
        "peak rate out of a worker under the same",
        _XAGG_TESTBED,
        "inanet.papers.xagg_testbed:fig15",
        measured=True,
    ),
    Entry(
        "xagg-fig21",
        "XAgg",
        "Fig. 21",
        "sending rate every 10 ms while the receiver's bandwidth drops from 60 to 20 Gbit/s and returns",
        "the paper's rates; a model of the port around the negotiator itself, TCP Reno beside it",
        "inanet.papers.xagg_rates:run",
    ),
    Entry(
        "xagg-delays",
        "XAgg",
        "section VI-C",
        "delays of rate initialisation, rate update and deployment",
        "this machine, on its loopback and with 0.5 ms on each link",
        "inanet.papers.xagg_delays:run",
        measured=True,
    ),
)
