"""How ranks, tensors and durations are written in what users read."""

from collections.abc import Collection, Iterable

from inanet.proto.common.plan import TensorSpec

#: Longest text of a control message, in characters, with room below the codec's limit.
_LONGEST = 8000
#: Parts of a list of ranks.
_MOST_PARTS = 32


def clip(text: str) -> str:
    """The text, cut to what a control message carries."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def listing(items: Iterable[str]) -> str:
    """``"a, b and c"``."""
    items = list(items)
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def show_ranks(ranks: Collection[int]) -> str:
    """``"rank 3"`` or ``"ranks 0-2, 5 and 7"``; runs of three and more are joined, long lists are cut."""
    parts: list[str] = []
    pending = sorted(set(ranks))
    while pending:
        run = 1
        while run < len(pending) and pending[run] == pending[0] + run:
            run += 1
        if run > 2:
            parts.append(f"{pending[0]}-{pending[run - 1]}")
        else:
            parts.extend(str(rank) for rank in pending[:run])
        del pending[:run]
        if len(parts) >= _MOST_PARTS and pending:
            parts.append(f"{len(pending)} more")
            break
    if not parts:
        return "no rank"
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {listing(parts)}"


def show_spec(spec: TensorSpec) -> str:
    """``"tensor 'w', f32 (3, 4), sum"``."""
    return f"tensor {spec.name!r}, {spec.dtype} {spec.shape}, {spec.op}"


def differences(ours: TensorSpec, theirs: TensorSpec) -> list[tuple[str, str, str]]:
    """Fields in which two specs differ: name, our value, their value."""
    found = []
    for field in ("name", "dtype", "shape", "op", "mode", "factor", "propagate"):
        a, b = getattr(ours, field), getattr(theirs, field)
        if a != b:
            if field == "mode":
                a, b = a.name.lower(), b.name.lower()
            found.append((field, repr(a), repr(b)))
    return found
