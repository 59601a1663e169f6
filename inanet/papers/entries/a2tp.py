"""Figures and tables of the A2TP paper."""

from inanet.papers.entries.entry import Entry

_A2TP_SCALE = (
    "the paper's testbed with rates, slots, windows and queues divided by 5; milliseconds instead of seconds"
)
_TRAINING_SCALE = f"{_A2TP_SCALE}; iterations 200 times shorter"
_LEAF_SPINE_SCALE = (
    "12 racks of 2 servers instead of 48: servers, jobs and memory divided by 24, two core switches; rates, slots and "
    "queues by 5; iterations 1000 times shorter"
)
ENTRIES = (
    Entry(
        "a2tp-fig2",
        "A2TP",
        "Fig. 2",
        "throughput of a job beside a straggling one, under SwitchML, ATP and A2TP",
        _A2TP_SCALE,
        "inanet.papers.a2tp_testbed:fig2",
        long=True,
    ),
    Entry(
        "a2tp-fig2-live",
        "A2TP",
        "Fig. 2",
        "the same on real daemons in a star of namespaces: throughput and slots over time, in turn",
        "measured on this machine; 20 Mbit/s or less instead of 53 Gbit/s, one PS for both jobs, 64 slots; needs root",
        "inanet.papers.a2tp_live_figure:fig2",
        measured=True,
    ),
    Entry(
        "a2tp-fig5",
        "A2TP",
        "Fig. 5",
        "the least threshold H by the model, against flows, for 450 and 900 slots",
        "the paper's",
        "inanet.papers.a2tp_threshold:fig5",
    ),
    Entry(
        "a2tp-fig7",
        "A2TP",
        "Fig. 7",
        "total throughput of two jobs against the straggling level, and against slots",
        _A2TP_SCALE,
        "inanet.papers.a2tp_sweep:fig7",
        long=True,
    ),
    Entry(
        "a2tp-fig7a",
        "A2TP",
        "Fig. 7(a)",
        "total throughput of two jobs against the straggling level",
        _A2TP_SCALE,
        "inanet.papers.a2tp_sweep:fig7a",
        long=True,
    ),
    Entry(
        "a2tp-fig7b",
        "A2TP",
        "Fig. 7(b)",
        "total throughput of two jobs against slots, 100 to 50 % of the measured PTA",
        _A2TP_SCALE,
        "inanet.papers.a2tp_sweep:fig7b",
        long=True,
    ),
    Entry(
        "a2tp-fig9",
        "A2TP",
        "Fig. 9",
        "iterations of a job beside a straggling one, four models",
        _TRAINING_SCALE,
        "inanet.papers.a2tp_training:fig9",
        long=True,
    ),
    Entry(
        "a2tp-fig10",
        "A2TP",
        "Fig. 10",
        "mean iteration of 1 to 8 jobs on eight servers",
        _TRAINING_SCALE,
        "inanet.papers.a2tp_training:fig10",
        long=True,
    ),
    Entry(
        "a2tp-fig11",
        "A2TP",
        "Fig. 11",
        "estimated straggling degree against what the straggler can send",
        _A2TP_SCALE,
        "inanet.papers.a2tp_testbed:fig11",
        long=True,
    ),
    Entry(
        "a2tp-fig12",
        "A2TP",
        "Fig. 12",
        "total throughput of 2 and 8 jobs against the threshold H",
        _A2TP_SCALE,
        "inanet.papers.a2tp_threshold:fig12",
        long=True,
    ),
    Entry(
        "a2tp-fig13",
        "A2TP",
        "Fig. 13",
        "mean iteration in a leaf-spine network, against jobs and against memory",
        _LEAF_SPINE_SCALE,
        "inanet.papers.a2tp_datacenter:fig13",
        long=True,
    ),
    Entry(
        "a2tp-fig13a",
        "A2TP",
        "Fig. 13(a)",
        "mean iteration in a leaf-spine network, 160 to 320 jobs",
        _LEAF_SPINE_SCALE,
        "inanet.papers.a2tp_datacenter:fig13a",
        long=True,
    ),
    Entry(
        "a2tp-fig13b",
        "A2TP",
        "Fig. 13(b)",
        "mean iteration in a leaf-spine network, 1 to 3 MB of memory",
        _LEAF_SPINE_SCALE,
        "inanet.papers.a2tp_datacenter:fig13b",
        long=True,
    ),
)
