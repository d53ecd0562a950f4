"""Six solvers over one base, all of them PyTorch optimizers, all driven by one loop."""

from halp.optim.bit_center import BitCenterSGD, BitCenterSVRG
from halp.optim.sgd import LPSGD, SGD
from halp.optim.svrg import LPSVRG, SVRG

__all__ = ["LPSGD", "LPSVRG", "SGD", "SVRG", "BitCenterSGD", "BitCenterSVRG"]
