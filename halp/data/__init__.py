"""Data sets of the experiments, whole and in memory, and the loader that makes batches of them."""

from halp.data.batches import Batches
from halp.data.dataset import DataError, Dataset
from halp.data.digits import load_digits
from halp.data.mnist import load_mnist

__all__ = ["Batches", "DataError", "Dataset", "load_digits", "load_mnist"]
