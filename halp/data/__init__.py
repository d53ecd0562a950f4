"""Data sets of the experiments, whole and in memory, and the loader that makes batches of them."""

from halp.data.batches import Batches
from halp.data.cifar10 import load_cifar10
from halp.data.conll2000 import load_conll2000
from halp.data.dataset import IGNORED, DataError, Dataset, units
from halp.data.digits import load_digits
from halp.data.images import as_images, crop_and_flip
from halp.data.mnist import load_mnist
from halp.data.sequences import trim_padding

__all__ = [
    "IGNORED",
    "Batches",
    "DataError",
    "Dataset",
    "as_images",
    "crop_and_flip",
    "load_cifar10",
    "load_conll2000",
    "load_digits",
    "load_mnist",
    "trim_padding",
    "units",
]
