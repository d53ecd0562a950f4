"""The models of the experiments: plain ``nn.Module`` classes with nothing of HALP in them."""

from halp.models.logreg import LogisticRegression

__all__ = ["LogisticRegression"]
