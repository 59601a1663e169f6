"""NetReduce's Fig. 11: training on six machines with a GPU each, from the iterations that Table 7 has for four."""

from inanet.papers.claims import Claim
from inanet.papers.netreduce import rates
from inanet.papers.netreduce_model import HOP, MODELS
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.planning.patterns import ring

#: machines of testbed 1; gains over a ring that the text gives, per cent
SIX = 6
_LANGUAGE = {
    "BERT pretraining": 34.6,
    "GPT-2 pretraining": 24.8,
    "GLUE-MNLI": 27.3,
    "GLUE-QNLI": 29.6,
    "GLUE-QQP": 22.2,
    "SQuAD": 42.5,
}


def fig11() -> Outcome:
    """Speed-up of NetReduce and SwitchML over a ring on six machines, from Table 7's iterations."""
    behind = rates("netreduce")[1] / rates("switchml")[1]
    claims, rows = [], []
    speeds: dict[str, tuple[float, float]] = {}
    for name, model in MODELS.items():
        alone = model.size / model.rate
        slow = model.computing + ring(SIX, model.size, model.rate, HOP)
        speeds[name] = (slow / (model.computing + alone), slow / (model.computing + alone * behind))
        rows.append((name, *speeds[name], slow / (model.computing + alone * 86.8 / 32.7)))
    small = rows[0][3]
    claims += [
        Claim("AlexNet: NetReduce over a ring", 1.45, speeds["AlexNet"][0], ">="),
        Claim("AlexNet: SwitchML over a ring", 1.18, speeds["AlexNet"][1], ">="),
        Claim(
            "AlexNet: SwitchML over a ring, at the goodput that Table 6 has",
            1.18,
            small,
            ">=",
            reason=""
            if small >= 1.18
            else "with 32.7 of NetReduce's 86.8 Gbit/s a tensor takes longer than a ring takes; Fig. 11 and Table 6 do not go"
            " together in a model without overlap",
        ),
        Claim(
            "ResNet50: NetReduce over SwitchML", 1.0, speeds["ResNet50"][0] / speeds["ResNet50"][1], "~", 0.05
        ),
    ]
    # a ring of six moves 10/6 of what NetReduce moves, so at most 40 % of its communication can go
    spared = 1 - 1 / ring(SIX, 1.0, 1.0, 0.0)
    language = []
    for name, gained in _LANGUAGE.items():
        share = 100 * (1 - 1 / (1 + gained / 100)) / spared
        language.append((name, gained, share))
        claims.append(
            Claim(f"{name}: communication that {gained} % need, per cent of an iteration", 100, share, "<=")
        )
    bars = {
        "NetReduce (model)": [(row[0], row[1]) for row in rows],
        "SwitchML (model)": [(row[0], row[2]) for row in rows],
    }
    return Outcome(
        tuple(claims),
        (
            Table(
                "speed over a ring, six machines",
                ("model", "netreduce", "switchml, goodput here", "switchml, goodput of Table 6"),
                tuple(rows),
            ),
            Table(
                "gains over a ring as printed",
                ("task", "per cent", "share of communication"),
                tuple(language),
            ),
        ),
        (Panel("speed over a ring", "model", "times", bars),),
        (
            "Table 7's models, on six machines instead of four; half precision, batches of 32. Those of the figure are not told.",
            f"SwitchML's tensors take {behind:.2f} times NetReduce's time, as in netreduce-table6, where hosts cost nothing.",
            "Language models: their sizes and iterations are not printed; what is said is which part of an iteration must be"
            " communication for the gain.",
        ),
    )
