"""Looking up tables by index: linear in the table."""

from functools import partial

import torch

from halp.bitcenter.dispatch import register_rule
from halp.bitcenter.rules.linear import same_operation

aten = torch.ops.aten

for _op in (aten.embedding.default, aten.embedding_dense_backward.default):
    register_rule(_op)(partial(same_operation, _op))
