"""Figures and tables of the Zebra paper."""

from inanet.papers.entries.entry import Entry

_ZEBRA_DATA = (
    "real: sources that every machine has, 38,000 to 192,000 samples; generated: the paper's parameters and shares, 400 "
    "million updates"
)
ENTRIES = (
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
