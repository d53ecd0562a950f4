"""What the tests of saving and loading share."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.optim.runs import Run, regression


def net(seed: int = 1) -> nn.Module:
    """Two layers of one shape, whose states could be taken for each other's."""
    torch.manual_seed(seed)
    layers = nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)
    return nn.Sequential(*layers)


def named(model: nn.Module) -> list:
    return list(model.named_parameters())


def backwards(model: nn.Module) -> list:
    return named(model)[::-1]


def run_of(solver: str, seed: int = 1, groups=named, **options) -> Run:
    return Run(
        solver,
        net(seed),
        regression(torch.float32),
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-2,
        groups=groups,
        precision={"format": "fp16", "rounding": "near"},
        **options,
    )


def resumed(original: Run, run: Run) -> Run:
    run.model.load_state_dict(original.model.state_dict())
    run.optimizer.load_state_dict(original.optimizer.state_dict())
    run.count = original.count
    return run


def snapshot_of(optimizer) -> tuple[dict, dict]:
    state = copy.deepcopy(optimizer.state_dict())
    return state["state"], {**state["solver"], "groups": state["param_groups"]}


def assert_same_state(found: tuple, expected: tuple) -> None:
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for number, entry in expected[0].items():
        assert found[0][number].keys() == entry.keys()
        for key, value in entry.items():
            same = torch.equal if isinstance(value, Tensor) else lambda a, b: a == b
            assert same(found[0][number][key], value), (number, key)


def halved(optimizer: Any, state_dict: dict) -> dict:
    entries = {
        number: {k: v * 0.5 if isinstance(v, Tensor) else v for k, v in entry.items()}
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": entries}
