"""The models of the experiments: plain ``nn.Module`` classes with nothing of HALP in them."""

from halp.models.lenet import LeNet
from halp.models.logreg import LogisticRegression
from halp.models.lstm import LSTMTagger
from halp.models.resnet import ResNet18

__all__ = ["LSTMTagger", "LeNet", "LogisticRegression", "ResNet18"]
