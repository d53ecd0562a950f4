"""The handwritten digits that scikit-learn carries."""

import numpy
import torch

from halp.data.dataset import Dataset

N_TRAIN = 1437


def load_digits() -> Dataset:
    """Load scikit-learn's 1797 handwritten digits of 8 x 8 pixels; nothing is downloaded.

    Returns:
        Inputs float32 of shape (N, 64), pixels divided by their maximum, 16; labels 0 ... 9.
        Rows are permuted by ``numpy.random.default_rng(0)``; the first 1437 train, 360 test.
    """
    from sklearn.datasets import load_digits as load_from_sklearn

    pixels, labels = load_from_sklearn(return_X_y=True)
    order = numpy.random.default_rng(0).permutation(len(labels))
    inputs = torch.from_numpy(pixels[order] / 16).float()
    classes = torch.from_numpy(labels[order]).long()
    return Dataset(
        name="digits",
        train_inputs=inputs[:N_TRAIN],
        train_labels=classes[:N_TRAIN],
        test_inputs=inputs[N_TRAIN:],
        test_labels=classes[N_TRAIN:],
        n_classes=10,
    )
