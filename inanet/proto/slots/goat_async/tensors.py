"""Tensors that asynchronous training can have. Light to import."""

from inanet.proto.common.plan import ExponentMode, TensorSpec


def suits(spec: TensorSpec) -> None:
    """Raises ``ValueError`` for a tensor that epochs cannot have: nobody knows in time whose exponents there will be, and a
    mean is over those who take part.
    """
    if spec.dtype != "f32" or spec.op != "mean" or spec.mode is not ExponentMode.FIXED or not spec.elements:
        raise ValueError(
            f"tensor {spec.name!r}: asynchronous training takes the mean of f32 under a fixed factor "
            f"(op='mean', mode='fixed'), not the {spec.op} of {spec.elements} {spec.dtype} in mode "
            f"{spec.mode.name.lower()!r}"
        )
