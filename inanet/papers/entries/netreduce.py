"""Figures and tables of the NetReduce paper."""

from inanet.papers.entries.entry import Entry

_NETREDUCE_MODEL = (
    "equations (1) to (3), with computing and rates that follow from the paper's printed communication times"
)
ENTRIES = (
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
