"""The demo's training in one process, its averages made as one host makes them: what any fabric has to give."""

from threadpoolctl import threadpool_limits

from inanet.data.digits import Digits
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.training.classifier import parameters
from inanet.training.descent import Descent, Recipe, batches, digest, part_gradients

MODES = {"prologue": ExponentMode.PROLOGUE, "carried": ExponentMode.CARRIED}


def trained(recipe: Recipe, digits: Digits) -> str:
    """The digest of the weights after the training."""
    spec = TensorSpec("gradient", "f32", (parameters(recipe.units),), "mean", MODES[recipe.mode])
    tensor, descent = LocalTensor(spec, recipe.parts), Descent(recipe)
    # as the demo's processes do: products of matrices may depend on the number of threads
    with threadpool_limits(1):
        for parts in batches(recipe, len(digits.images)):
            _, gradients = part_gradients(recipe, digits, descent.weights, parts)
            averages = list(gradients)
            assert tensor.reduce(averages) is None
            descent.step(averages[0])
    return digest(descent.weights)
