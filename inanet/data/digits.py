"""The demo's data: scikit-learn's handwritten digits, scaled and split once for all processes.

Importing scikit-learn takes a second or more and some hundred megabytes, so one short-lived process does it
(this module's ``main``) and everybody else reads the file it leaves.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: Pixels per image (8 x 8) and digits to tell apart.
PIXELS = 64
CLASSES = 10
#: Images held out of training; scikit-learn ships 1797.
HELD_OUT = 360
#: The split is part of the data set, not of a run: runs with different seeds compare on the same held-out
#: images.
SPLIT_SEED = 1797


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as float32[count, 64] in 0..1 and their digits as int64[count]; ``held_out`` images never
    train."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    held_out_images: NDArray[np.float32]
    held_out_labels: NDArray[np.int64]


def split(images: NDArray[np.float64], labels: NDArray[np.int64]) -> Digits:
    """Digits from raw pixels, float64[count, 64] in 0..16, with the last :data:`HELD_OUT` of a fixed
    shuffle held out."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    scaled = (images / 16.0).astype(np.float32)[order]
    digits = labels.astype(np.int64)[order]
    return Digits(scaled[:-HELD_OUT], digits[:-HELD_OUT], scaled[-HELD_OUT:], digits[-HELD_OUT:])


def fetch() -> Digits:
    """The digits from the installed scikit-learn; nothing is downloaded. Raises ``ImportError`` without
    it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return split(images, labels)


def save(digits: Digits, path: Path) -> None:
    """Write ``path`` as an uncompressed npz for :func:`load`."""
    np.savez(path, **{name: getattr(digits, name) for name in Digits.__slots__})


def load(path: Path) -> Digits:
    """Read what :func:`save` wrote."""
    with np.load(path) as archive:
        return Digits(**{name: archive[name] for name in Digits.__slots__})


def main() -> None:
    """``python -m inanet.data.digits PATH``: fetch and save."""
    save(fetch(), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
