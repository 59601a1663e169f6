"""Sub-models: the parts of a gradient that are scheduled as a whole, one per layer by default.

GOAT takes PyTorch's own partition (one tensor of parameters each, section VI). A layer that is larger than what one
switch shall hold of it is cut into parts of nearly equal size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

#: Bytes of one gradient value on the wire.
VALUE_BYTES = 4
#: Values of one fragment (GOAT, section VI).
FRAGMENT_VALUES = 64


class Parameter(Protocol):
    """One tensor of a model."""

    def numel(self) -> int:
        """Number of values."""
        ...


@runtime_checkable
class Model(Protocol):
    """Anything with parameters, such as a ``torch.nn.Module``."""

    def parameters(self) -> Iterable[Parameter]:
        """Tensors of parameters, in the model's order."""
        ...


@runtime_checkable
class NamedModel(Protocol):
    """A model that knows its tensors' names."""

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """Tensors with their names, in the model's order."""
        ...


@dataclass(frozen=True, slots=True)
class SubModel:
    """``size`` bytes of the gradient that begin at byte ``start`` of the whole."""

    name: str
    start: int
    size: int

    @property
    def fragments(self) -> int:
        """Fragments of :data:`FRAGMENT_VALUES` values, the last one perhaps partly empty."""
        return -(-self.size // (FRAGMENT_VALUES * VALUE_BYTES))


#: Values of AlexNet's tensors, weight and bias of each layer (the model of torchvision and of GOAT's simulations).
ALEXNET = (
    ("conv1.weight", 64 * 3 * 11 * 11),
    ("conv1.bias", 64),
    ("conv2.weight", 192 * 64 * 5 * 5),
    ("conv2.bias", 192),
    ("conv3.weight", 384 * 192 * 3 * 3),
    ("conv3.bias", 384),
    ("conv4.weight", 256 * 384 * 3 * 3),
    ("conv4.bias", 256),
    ("conv5.weight", 256 * 256 * 3 * 3),
    ("conv5.bias", 256),
    ("fc6.weight", 4096 * 256 * 6 * 6),
    ("fc6.bias", 4096),
    ("fc7.weight", 4096 * 4096),
    ("fc7.bias", 4096),
    ("fc8.weight", 1000 * 4096),
    ("fc8.bias", 1000),
)


def layers_of(model: object) -> list[tuple[str, int]]:
    """Names and sizes in bytes of a model's tensors, as float32.

    ``model``: something with ``named_parameters()`` or ``parameters()``, or a sequence of sizes in bytes. Raises
    ``TypeError`` for anything else, ``ValueError`` for sizes that are not positive multiples of 4.
    """
    if isinstance(model, NamedModel):
        return [(name, its.numel() * VALUE_BYTES) for name, its in model.named_parameters()]
    if isinstance(model, Model):
        return [(f"p{n}", its.numel() * VALUE_BYTES) for n, its in enumerate(model.parameters())]
    if isinstance(model, Sequence) and not isinstance(model, str | bytes):
        for size in model:
            if isinstance(size, bool) or not isinstance(size, int) or size <= 0 or size % VALUE_BYTES:
                raise ValueError(f"a layer of {size!r} B; sizes are positive multiples of {VALUE_BYTES} B")
        return [(f"layer{index}", size) for index, size in enumerate(model)]
    raise TypeError(
        f"{type(model).__name__} is neither a model with parameters() nor a list of sizes in bytes"
    )


def alexnet() -> list[tuple[str, int]]:
    """AlexNet's tensors and their sizes in bytes."""
    return [(name, values * VALUE_BYTES) for name, values in ALEXNET]


def partition(layers: Iterable[tuple[str, int]], at_most: int) -> tuple[SubModel, ...]:
    """One sub-model per layer, layers of more than ``at_most`` bytes cut into parts of nearly equal size.

    Parts begin at multiples of a fragment, so that no fragment belongs to two. Raises ``ValueError`` if ``at_most``
    is less than a fragment.
    """
    unit = FRAGMENT_VALUES * VALUE_BYTES
    if at_most < unit:
        raise ValueError(f"sub-models of at most {at_most} B; a fragment has {unit} B")
    return tuple(_parts(layers, at_most // unit, unit))


def _parts(layers: Iterable[tuple[str, int]], most: int, unit: int) -> Iterator[SubModel]:
    start = 0
    for name, size in layers:
        fragments = -(-size // unit)
        count = -(-fragments // most)
        for part in range(count):
            low, high = fragments * part // count, fragments * (part + 1) // count
            end = min(size, high * unit)
            label = name if count == 1 else f"{name}[{part}]"
            yield SubModel(label, start + low * unit, end - low * unit)
        start += size
