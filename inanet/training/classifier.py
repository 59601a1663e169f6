"""The demo's model: 64 pixels, one hidden layer of tanh units, softmax over ten digits.

All parameters live in one flat float32 vector, so that a gradient is one tensor and one all-reduce. tanh
rather than a rectifier: with a smooth network two runs whose gradients differ in the last bit stay close
together, and the comparison with the single-process run measures the network's arithmetic instead of kinks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.data.digits import CLASSES, PIXELS

F32 = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layers:
    """Views into a flat parameter (or gradient) vector."""

    hidden: F32
    """float32[64, units]"""
    hidden_bias: F32
    """float32[units]"""
    output: F32
    """float32[units, 10]"""
    output_bias: F32
    """float32[10]"""


def parameters(units: int) -> int:
    """Length of the flat vector for ``units`` hidden units."""
    return (PIXELS + 1) * units + (units + 1) * CLASSES


def layers(flat: F32, units: int) -> Layers:
    """The four arrays inside ``flat``, which must be float32[parameters(units)]; no copies."""
    first = PIXELS * units
    second = first + units
    third = second + units * CLASSES
    return Layers(
        hidden=flat[:first].reshape(PIXELS, units),
        hidden_bias=flat[first:second],
        output=flat[second:third].reshape(units, CLASSES),
        output_bias=flat[third:],
    )


def initial(units: int, seed: int) -> F32:
    """Starting weights, the same in every process that uses the same seed; biases are zero."""
    generator = np.random.default_rng(seed)
    flat = np.zeros(parameters(units), np.float32)
    views = layers(flat, units)
    views.hidden[:] = generator.standard_normal(views.hidden.shape) / np.sqrt(PIXELS)
    views.output[:] = generator.standard_normal(views.output.shape) / np.sqrt(units)
    return flat


def forward(flat: F32, units: int, images: F32) -> tuple[F32, F32]:
    """Hidden activations float32[count, units] and log-probabilities float32[count, 10]."""
    views = layers(flat, units)
    hidden = np.tanh(images @ views.hidden + views.hidden_bias)
    scores = hidden @ views.output + views.output_bias
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return hidden, scores


def gradient(flat: F32, units: int, images: F32, labels: Labels) -> tuple[float, F32]:
    """Mean cross-entropy over the images, and its gradient as a new float32[parameters(units)]."""
    hidden, log_probabilities = forward(flat, units, images)
    rows = np.arange(len(labels))
    loss = -float(log_probabilities[rows, labels].mean(dtype=np.float64))
    error = np.exp(log_probabilities)
    error[rows, labels] -= 1
    error /= np.float32(len(labels))
    result = np.empty_like(flat)
    views = layers(result, units)
    views.output[:] = hidden.T @ error
    views.output_bias[:] = error.sum(axis=0)
    inner = (error @ layers(flat, units).output.T) * (1 - hidden * hidden)
    views.hidden[:] = images.T @ inner
    views.hidden_bias[:] = inner.sum(axis=0)
    return loss, result


def score(flat: F32, units: int, images: F32, labels: Labels) -> tuple[float, float]:
    """Accuracy (0 to 1) and mean cross-entropy of the weights on some images."""
    _, log_probabilities = forward(flat, units, images)
    hits = log_probabilities.argmax(axis=1) == labels
    return float(hits.mean()), -float(
        log_probabilities[np.arange(len(labels)), labels].mean(dtype=np.float64)
    )
