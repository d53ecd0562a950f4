"""The delta rules, one module a family. Importing this package registers them all."""

from halp.bitcenter.rules import (  # noqa: F401
    activation,
    arithmetic,
    convolution,
    indexing,
    linear,
    loss,
    normalization,
    pooling,
    recurrent,
    shape,
    weight_norm,
)
