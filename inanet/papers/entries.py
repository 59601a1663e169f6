"""All figures and tables that can be run, one list a paper: their names, scales and what runs them."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from inanet.papers.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure or table. ``target`` is ``module:function``, which takes nothing and returns an
    :class:`~inanet.papers.outcome.Outcome`.
    """

    name: str
    paper: str
    #: figure or table, as the paper numbers it
    figure: str
    #: what is run, in a line
    what: str
    #: how the run relates to the paper's
    scale: str
    target: str
    #: of this machine, not of a model: no two runs give the same numbers
    measured: bool = False
    #: takes so long that its two runs are made at the same time, in two processes
    long: bool = False

    def function(self) -> Callable[[], Outcome]:
        """Import what runs it. Raises ``ImportError`` if an optional package is missing."""
        module, _, name = self.target.partition(":")
        found: Callable[[], Outcome] = getattr(importlib.import_module(module), name)
        return found


_A2TP_SCALE = (
    "the paper's testbed with rates, slots, windows and queues divided by 5; milliseconds instead of seconds"
)
_TRAINING_SCALE = f"{_A2TP_SCALE}; iterations 200 times shorter"
_LEAF_SPINE_SCALE = (
    "12 racks of 2 servers instead of 48: servers, jobs and memory divided by 24, two core switches; rates, slots and "
    "queues by 5; iterations 1000 times shorter"
)
_A2TP = (
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
        "inanet.papers.a2tp_live:fig2",
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
_GOAT_SCALE = (
    "the paper's: leaf-spine of 20 switches and 50 servers, fat-tree of 80 and 192, a fifth programmable with "
    "64 MB, 221 MB per worker; means over three seeded placements"
)
_GOAT_TESTBED_SCALE = "the paper's testbed with rates, gradients and memory divided by 1000, in virtual time; hosts cost nothing"
_GOAT = (
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
_NETREDUCE_MODEL = (
    "equations (1) to (3), with computing and rates that follow from the paper's printed communication times"
)
_NETREDUCE = (
    Entry(
        "netreduce-fig7",
        "NetReduce",
        "Fig. 7",
        "communication time of flat ring, Tencent all-reduce and parallel NetReduce; ring and NetReduce in packets",
        "the paper's by its equations; packets at 10 Gbit/s instead of 100",
        "inanet.papers.netreduce:fig7",
    ),
    Entry(
        "netreduce-fig11",
        "NetReduce",
        "Fig. 11",
        "speed of training over ring all-reduce on six machines: NetReduce and SwitchML",
        f"{_NETREDUCE_MODEL}; goodputs of netreduce-table6",
        "inanet.papers.netreduce_speed:fig11",
    ),
    Entry(
        "netreduce-fig12",
        "NetReduce",
        "Fig. 12",
        "difference of losses between NetReduce and ring all-reduce in a training run",
        "a classifier of handwritten digits on four hosts instead of CNNs on ImageNet; real packets in virtual time",
        "inanet.papers.netreduce_loss:fig12",
    ),
    Entry(
        "netreduce-fig13",
        "NetReduce",
        "Fig. 13",
        "throughput of a GPU on 1 to 4 machines with one each: ring all-reduce and NetReduce",
        _NETREDUCE_MODEL,
        "inanet.papers.netreduce_testbed:fig13",
    ),
    Entry(
        "netreduce-fig14",
        "NetReduce",
        "Fig. 14",
        "throughput of a GPU on 2 to 4 machines with eight each: flat ring, Tencent all-reduce, parallel NetReduce",
        _NETREDUCE_MODEL,
        "inanet.papers.netreduce_testbed:fig14",
    ),
    Entry(
        "netreduce-table1",
        "NetReduce",
        "Table 1",
        "throughput, goodput, processor time and round trips of RoCE in user space beside kernel TCP and UDP",
        "measured between two processes of this machine, over its loopback instead of 100 Gbit/s cards",
        "inanet.papers.netreduce_transports:table1",
        measured=True,
    ),
    Entry(
        "netreduce-table6",
        "NetReduce",
        "Table 6",
        "throughput and goodput of six workers under ATP, SwitchML and NetReduce",
        "six workers as in the paper, links of 10 Gbit/s instead of 100, hosts that cost nothing",
        "inanet.papers.netreduce:table6",
    ),
    Entry(
        "netreduce-table6-live",
        "NetReduce",
        "Table 6",
        "throughput, goodput, processor time and round trips under NetReduce, SwitchML and ATP, beside Gloo and a TCP server",
        "measured between processes of this machine, four hosts instead of six, over its loopback instead of 100 Gbit/s cards",
        "inanet.papers.netreduce_live:table6",
        measured=True,
    ),
    Entry(
        "netreduce-table7",
        "NetReduce",
        "Table 7",
        "iteration and communication with four GPUs: ring all-reduce as printed, NetReduce by the model",
        _NETREDUCE_MODEL,
        "inanet.papers.netreduce_testbed:table7",
    ),
    Entry(
        "netreduce-table8",
        "NetReduce",
        "Table 8",
        "throughput that a GPU loses when there are eight to a machine: flat ring and parallel NetReduce",
        _NETREDUCE_MODEL,
        "inanet.papers.netreduce_testbed:table8",
    ),
    Entry(
        "netreduce-table9",
        "NetReduce",
        "Table 9",
        "throughput of parallel NetReduce above flat ring and Tencent all-reduce with 32 GPUs",
        _NETREDUCE_MODEL,
        "inanet.papers.netreduce_testbed:table9",
    ),
)
_XAGG_LAB = "seven workers, two servers, a PS and a switch in a lab, rates divided by 100"
_XAGG_TESTBED = f"{_XAGG_LAB}; the larger models by the planner's model"
_XDP_SCALE = "measured on this machine, over a virtual cable instead of 100 Gbit/s cards; needs root and, for sizes, clang"
_XAGG = (
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
        "xagg-fig13-large",
        "XAgg",
        "Fig. 13",
        "the same for its three larger models, each scheme by itself",
        f"{_XAGG_LAB}; some ten minutes, 16 GB of memory",
        "inanet.papers.xagg_testbed:fig13_large",
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
_ZEBRA_DATA = (
    "real: sources that every machine has, 38,000 to 192,000 samples; generated: the paper's parameters and shares, 400 "
    "million updates"
)
_ZEBRA = (
    Entry(
        "zebra-fig4",
        "Zebra",
        "Fig. 4",
        "share of all updates that the hottest parameters have",
        _ZEBRA_DATA,
        "inanet.papers.zebra_hot:fig4",
    ),
    Entry(
        "zebra-fig6",
        "Zebra",
        "Fig. 6",
        "throughput of sparse aggregation under Zebra, a PS and SwitchML, 4 to 32 workers",
        "simulation with Zebra's machines; hot sets, models and batches a tenth of the paper's, 1 Gbit/s",
        "inanet.papers.zebra_throughput:fig6",
    ),
    Entry(
        "zebra-fig6-live",
        "Zebra",
        "Fig. 6",
        "throughput of sparse aggregation by eight ranks, a switch and a PS that are processes",
        "measured on this machine over UDP, behind links of 4 Mbit/s; hot sets, models and batches a tenth of the paper's",
        "inanet.papers.zebra_live:fig6",
        measured=True,
    ),
    Entry(
        "zebra-fig7",
        "Zebra",
        "Fig. 7",
        "what twice the memory in the switch is worth to Zebra and to SwitchML, 16 workers",
        "simulation with Zebra's machines, a tenth of the paper's sizes, batches of two sizes; SwitchML at 100 Gbit/s",
        "inanet.papers.zebra_memory:fig7",
    ),
    Entry(
        "zebra-fig8",
        "Zebra",
        "Fig. 8",
        "throughput of sparse aggregation against the number of hot parameters, 16 workers",
        "simulation with Zebra's machines, a tenth of the paper's sizes, batches of two sizes",
        "inanet.papers.zebra_memory:fig8",
    ),
    Entry(
        "zebra-fig9",
        "Zebra",
        "Fig. 9",
        "precision and Kendall tau of hot parameters found in a sample, against its size",
        _ZEBRA_DATA,
        "inanet.papers.zebra_hot:fig9",
    ),
    Entry(
        "zebra-fig10",
        "Zebra",
        "Fig. 10",
        "recirculations per packet with random and heat-based layout, and with packaging",
        "hot sets of the paper's sizes; pairs per packet and registers, which it does not give, are swept",
        "inanet.papers.zebra_layout:fig10",
    ),
    Entry(
        "zebra-fig11",
        "Zebra",
        "Fig. 11",
        "slowdown of communication under loss of 0.01 to 0.1 %",
        "simulation; hot set and batches of the paper's size, four workers, 1 Gbit/s",
        "inanet.papers.zebra_throughput:fig11",
    ),
    Entry(
        "zebra-fig12",
        "Zebra",
        "Fig. 12",
        "time to train models to a threshold, with Zebra and with a PS alone",
        "two models trained on real data by the machines themselves in virtual time, and iterations of the industrial ones; "
        "computing as the paper's ranges imply",
        "inanet.papers.zebra_training:fig12",
    ),
    Entry(
        "zebra-table2",
        "Zebra",
        "Table II",
        "precision of hot parameters found after 10 of 200 iterations",
        _ZEBRA_DATA,
        "inanet.papers.zebra_hot:table2",
    ),
)

ENTRIES: Mapping[str, Entry] = MappingProxyType(
    {entry.name: entry for entry in (*_A2TP, *_GOAT, *_NETREDUCE, *_XAGG, *_ZEBRA)}
)
