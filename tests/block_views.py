"""Views of a matrix of 4 × 64, in which blocks of 32 hold other numbers than in the matrix."""

import torch

VIEWS = {
    "the matrix": lambda x: x,
    "t": lambda x: x.t(),
    "narrower": lambda x: x.view(16, 16),
    "wider": lambda x: x.view(2, 128),
    "flat": lambda x: x.view(-1),
    "columns": lambda x: x[:, 3:],
    "strided columns": lambda x: x[:, ::3],
    "a row": lambda x: x[1],
    "a column": lambda x: x[:, 5],
    "expanded": lambda x: x[None].expand(3, 4, 64),
    "expanded last": lambda x: x[:, :1].expand(4, 40),
    "permuted": lambda x: x.view(4, 8, 8).permute(2, 0, 1),
    "channels last": lambda x: x.view(4, 2, 4, 8).permute(0, 3, 1, 2),
    "split": lambda x: x.split(20, 1)[1],
    "diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(1, 8, 3),
    "there and back": lambda x: x.view(16, 16).t().t().view(4, 64),
}


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers of very different magnitudes: blocks of other neighbours differ."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-4, 5, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
