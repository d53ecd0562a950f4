"""Claims about scikit-learn's digits, against scikit-learn itself."""

import numpy
import sklearn.datasets
import torch

from halp.data import load_digits


def test_pixels_and_labels_are_scikit_learns_in_the_agreed_order():
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = numpy.random.default_rng(0).permutation(1797)
    data = load_digits()
    assert torch.equal(data.train_inputs.double() * 16, torch.from_numpy(pixels[order[:1437]]))
    assert torch.equal(data.test_inputs.double() * 16, torch.from_numpy(pixels[order[1437:]]))
    assert data.train_labels.tolist() == labels[order[:1437]].tolist()
    assert data.test_labels.tolist() == labels[order[1437:]].tolist()


def test_shapes_dtypes_and_range():
    data = load_digits()
    assert data.train_inputs.shape == (1437, 64)
    assert data.test_inputs.shape == (360, 64)
    assert data.n_features == 64
    assert data.n_classes == 10
    assert data.train_inputs.dtype == torch.float32
    assert data.train_labels.dtype == torch.int64
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 1)
