"""Claims about checkpoint files: what they keep, and what is refused."""

import dataclasses
import os
import pickle
import zipfile

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import halp
from halp.training import Checkpoint, CheckpointError, CheckpointFolder

ARCHITECTURE = {"name": "net", "width": 4, "n_classes": 3}
ORIGIN = {"solver": "sgd", "format": None, "epoch": 7, "learning rate": 0.1}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def trained(steps: int = 3) -> tuple[nn.Module, halp.optim.SGD]:
    model = net()
    optimizer = halp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(6, 5)), torch.arange(6) % 3).backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", "net")


def saved(folder: CheckpointFolder, epoch: int = 7, **changes) -> Checkpoint:
    checkpoint = Checkpoint.of(*trained(), architecture=ARCHITECTURE, origin=ORIGIN)
    checkpoint = dataclasses.replace(checkpoint, **changes)
    folder.prepare([epoch])
    folder.write(epoch, checkpoint)
    return checkpoint


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(CheckpointError) as refused:
        call(*args, **kwargs)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_parameters_buffers_and_momentum_come_back_bit_for_bit(folder):
    model, optimizer = trained()
    saved(folder)
    checkpoint = folder.read(7)
    other = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    checkpoint.load_model(other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    taking = halp.optim.SGD(other.parameters(), lr=1.0, momentum=0.5)
    checkpoint.load_momentum(other, taking)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        buffers = optimizer.state[left]["momentum_buffer"], taking.state[right]["momentum_buffer"]
        assert torch.equal(*buffers)


def test_a_checkpoint_does_not_change_with_the_model():
    model, optimizer = trained()
    checkpoint = Checkpoint.of(model, optimizer, architecture=ARCHITECTURE, origin=ORIGIN)
    before = checkpoint.model["0.weight"].clone()
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(checkpoint.model["0.weight"], before)


def test_files_hold_plain_values_and_name_model_and_epoch(folder):
    saved(folder, 300)
    (path,) = folder.folder.iterdir()
    assert path.name == "net-epoch-300.pt"
    content = torch.load(path, weights_only=True)
    assert set(content) == {"kind", "version", "architecture", "origin", "model", "momentum"}
    assert type(content["model"]) is dict
    assert content["origin"] == ORIGIN


def test_it_says_what_it_holds_and_what_made_it(folder):
    saved(folder)
    expected = "net (width 4, classes 3), made with solver sgd, epoch 7, learning rate 0.1"
    assert str(folder.read(7)) == expected


def test_without_momentum_there_is_none(folder):
    model = net()
    optimizer = halp.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = Checkpoint.of(model, optimizer, architecture=ARCHITECTURE, origin=ORIGIN)
    assert checkpoint.momentum == {}
    checkpoint.load_momentum(model, optimizer)


def test_nothing_is_overwritten(folder):
    saved(folder)
    before = folder.path(7).read_bytes()
    assert "exists already and is not overwritten" in refusal(folder.prepare, [1, 7])
    assert "exists already" in refusal(saved, folder)
    assert folder.path(7).read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    folder = CheckpointFolder(tmp_path / "file" / "checkpoints", "net")
    assert "cannot be written" in refusal(folder.prepare, [1])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_interrupted_writing_leaves_no_file(folder, monkeypatch, interrupt):
    def half(content, file):
        file.write(b"half of it")
        raise interrupt("now")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(CheckpointError if interrupt is RuntimeError else interrupt):
        saved(folder)
    assert list(folder.folder.iterdir()) == []


def test_a_file_is_whole_before_it_has_its_name(folder, monkeypatch):
    replace, seen = os.replace, []

    def spy(source, target):
        assert not os.path.exists(target)
        seen.append(torch.load(source, weights_only=True)["origin"])
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    saved(folder)
    assert seen == [ORIGIN]


def test_a_missing_epoch_is_told_which_are_there(folder):
    message = refusal(folder.read, 7)
    assert "has no net checkpoint of epoch 7: it has none" in message
    for epoch in (10, 9, 100):
        saved(folder, epoch)
    (folder.folder / "other-epoch-1.pt").write_text("")
    message = refusal(folder.read, 7)
    assert message.endswith("has no net checkpoint of epoch 7: there are those of 9, 10, 100")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_refused(folder, kept):
    saved(folder)
    content = folder.path(7).read_bytes()
    folder.path(7).write_bytes(content[: int(kept * len(content))])
    assert "is cut short or damaged" in refusal(folder.read, 7)


def test_a_flipped_bit_is_noticed(folder):
    checkpoint = saved(folder)
    content = bytearray(folder.path(7).read_bytes())
    weight = checkpoint.model["0.weight"].numpy().tobytes()
    content[content.index(weight)] ^= 1
    folder.path(7).write_bytes(content)
    assert "is cut short or damaged" in refusal(folder.read, 7)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def foreign_files(path):
    yield lambda: path.write_text("epoch,loss\n1,0.5\n")
    yield lambda: path.write_bytes(pickle.dumps({"state": 1}))
    yield lambda: path.write_bytes(pickle.dumps(Harmful()))
    yield lambda: torch.save({"kind": Harmful()}, path)
    yield lambda: torch.save({"state_dict": net().state_dict()}, path)
    yield lambda: torch.save(torch.zeros(3), path)
    yield lambda: torch.save(net(), path)
    yield lambda: zipfile.ZipFile(path, "w").writestr("a.txt", "text")


@pytest.mark.parametrize("number", range(8))
def test_a_file_that_is_no_checkpoint_is_refused_and_not_executed(
    folder, number, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    folder.folder.mkdir()
    list(foreign_files(folder.path(7)))[number]()
    assert "is no checkpoint of halp" in refusal(folder.read, 7)
    assert not (tmp_path / "harmed").exists()


def test_a_newer_version_is_refused(folder):
    saved(folder)
    content = torch.load(folder.path(7), weights_only=True)
    torch.save(content | {"version": 2}, folder.path(7))
    message = refusal(folder.read, 7)
    assert "is a checkpoint of version 2, and this halp reads those up to 1" in message


@pytest.mark.parametrize("version", [0, -3, True, 1.0, "1", None])
def test_what_is_no_version_is_no_checkpoint(folder, version):
    saved(folder)
    content = torch.load(folder.path(7), weights_only=True)
    torch.save(content | {"version": version}, folder.path(7))
    assert "is no checkpoint of halp" in refusal(folder.read, 7)


@pytest.mark.parametrize("part", ["architecture", "origin", "model", "momentum"])
@pytest.mark.parametrize("value", [None, [], {"a": [1]}, {1: torch.zeros(1)}])
def test_missing_or_wrong_parts_are_named(folder, part, value):
    saved(folder)
    content = torch.load(folder.path(7), weights_only=True)
    torch.save(content | {part: value}, folder.path(7))
    assert f"is incomplete: its {part!r} is missing" in refusal(folder.read, 7)


def test_another_architecture_is_told_by_name_with_the_flag_that_mends_it(folder):
    saved(folder)
    checkpoint = folder.read(7)
    checkpoint.check_architecture(ARCHITECTURE, {})
    message = refusal(
        checkpoint.check_architecture, ARCHITECTURE | {"width": 64}, {"width": "--width"}
    )
    assert message == (
        "the checkpoint holds a net (width 4, classes 3), but this run has width 64: use --width=4"
    )
    message = refusal(checkpoint.check_architecture, ARCHITECTURE | {"n_classes": 2}, {})
    assert message.endswith("but this run has classes 2")


@pytest.mark.parametrize("what", ["model", "momentum"])
@pytest.mark.parametrize(
    "tensor, reason",
    [
        (torch.zeros(5, 4), r"has shape (5, 4), this model's (4, 5)"),
        (torch.full((4, 5), torch.nan), "holds NaN or infinity"),
        (torch.full((4, 5), -torch.inf), "holds NaN or infinity"),
        (torch.full((4, 5), 1e300, dtype=torch.float64), "holds NaN or infinity"),
        (torch.zeros(4, 5, dtype=torch.int64), "is torch.int64, this model's torch.float32"),
        (torch.zeros(4, 5).to_sparse(), "is not stored as an ordinary tensor"),
        (torch.zeros(4, 5, device="meta"), "is not stored as an ordinary tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(folder, what, tensor, reason):
    checkpoint = saved(folder)
    tensors = getattr(checkpoint, what) | {"0.weight": tensor}
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    message = refusal(dataclasses.replace(checkpoint, **{what: tensors}).load_model, model)
    assert reason in message and "'0.weight'" in message
    assert ("momentum" in message) == (what == "momentum")
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


def test_tensors_missing_and_one_too_many_are_named(folder):
    checkpoint = saved(folder)
    fewer = {name: t for name, t in checkpoint.model.items() if name != "1.running_mean"}
    message = refusal(dataclasses.replace(checkpoint, model=fewer).load_model, net())
    assert "lacks the tensor '1.running_mean'" in message
    for what, reason in (("model", "is not in this model"), ("momentum", "of no parameter")):
        more = getattr(checkpoint, what) | {"3.weight": torch.zeros(1)}
        message = refusal(dataclasses.replace(checkpoint, **{what: more}).load_model, net())
        assert "'3.weight'" in message and reason in message
