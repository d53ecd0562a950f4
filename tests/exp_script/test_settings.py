"""Claims about the command line: what it means, and what wrong use is told."""

import pytest
import torch

from flags import UsageError
from settings import parse
from tables import REPOSITORY

FLAGS = "--n-epochs=100 --batch-size=100 --reg=1e-5 --alpha=0.05 --momentum=0.9 --seed=1"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("HALP_DATA", raising=False)


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse(argv)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_defaults_are_halp_on_digits():
    settings = parse([])
    assert (settings.dataset, settings.model, settings.solver) == ("digits", "logreg", "bc-svrg")
    assert (settings.format, settings.rounding, settings.scale) == ("fp16", "near", "auto")
    assert settings.T is None
    assert settings.dtype == torch.float32
    assert settings.device == torch.device("cpu")
    assert settings.output is None


def test_a_command_line_of_the_older_system_keeps_its_meaning():
    settings = parse(
        f"{FLAGS} --n-classes=10 --solver=bc-svrg --rounding=near -T=600 --dataset=mnist "
        "--model=logreg --on-site-compute".split()
    )
    assert settings.n_epochs == 100
    assert settings.batch_size == 100
    assert settings.reg == 1e-5
    assert settings.alpha == 0.05
    assert settings.momentum == 0.9
    assert settings.seed == 1
    assert settings.n_classes == 10
    assert settings.T == 600
    assert (settings.solver, settings.rounding) == ("bc-svrg", "near")
    assert (settings.dataset, settings.model) == ("mnist", "logreg")


@pytest.mark.parametrize("solver", ["sgd", "lp-sgd", "svrg", "lp-svrg", "bc-sgd", "bc-svrg"])
def test_every_solver_takes_the_same_flags(solver):
    arguments = [*FLAGS.split(), f"--solver={solver}", "--rounding=void", "-T=600"]
    assert parse(arguments).solver == solver


def test_short_forms_and_both_spellings_of_t():
    short = parse("-e 3 -bs 4 -a 0.5 -m 0.25 -s 6 -c 12 -T 7".split())
    long = "--n-epochs 3 --batch-size 4 --alpha 0.5 --momentum 0.25 --seed 6 --n-classes 12 --T 7"
    assert parse(long.split()) == short
    assert parse("-e=3 -bs=4 -a=0.5 -m=0.25 -s=6 -c=12 -T=7".split()) == short


def test_settings_a_solver_has_no_use_for_are_none():
    sgd = parse(["--solver=sgd", "--rounding=near", "--format=bf16", "-T=5"])
    assert (sgd.format, sgd.rounding, sgd.scale, sgd.T) == (None, None, None, None)
    svrg = parse(["--solver=svrg", "-T=5"])
    assert (svrg.format, svrg.T) == (None, 5)
    assert parse(["--solver=lp-sgd", "-T=5"]).T is None


def test_scale_is_automatic_for_bit_centered_solvers_and_absent_otherwise():
    assert parse(["--solver=bc-sgd"]).scale == "auto"
    assert parse(["--solver=lp-svrg"]).scale == "none"
    assert parse(["--solver=lp-svrg", "--scale=auto"]).scale == "auto"
    assert parse(["--solver=bc-svrg", "--scale=none"]).scale == "none"
    assert parse(["--solver=bc-svrg", "--scale=0.5"]).scale == 0.5


def test_data_comes_from_the_flag_else_the_environment_else_the_repository(monkeypatch):
    assert parse([]).data_dir == str(REPOSITORY / "datasets")
    monkeypatch.setenv("HALP_DATA", "/environment")
    assert parse([]).data_dir == "/environment"
    assert parse(["--data-dir=/flag"]).data_dir == "/flag"
    monkeypatch.setenv("HALP_DATA", "")
    assert parse([]).data_dir == str(REPOSITORY / "datasets")


def test_a_model_that_is_not_available_is_told_which_are():
    expected = "--model=perceptron is not available: choose logreg, lenet, lstm or resnet"
    assert refusal("--model=perceptron") == expected


def test_a_data_set_that_is_not_available_is_told_which_are():
    expected = "--dataset=svhn is not available: choose digits, mnist, cifar10 or conll2000"
    assert refusal("--dataset=svhn") == expected


def test_an_unknown_solver_is_told_which_are_known():
    assert "choose sgd, lp-sgd, svrg, lp-svrg, bc-sgd or bc-svrg" in refusal("--solver=adam")


@pytest.mark.parametrize(
    "flags",
    [
        ["--resnet-save-ckpt"],
        ["--resnet-load-ckpt"],
        ["--resnet-fine-tune"],
        ["--resnet-save-ckpt-path=folder"],
        ["--resnet-load-ckpt-epoch-id=300"],
        ["--resnet-width=16"],
        ["--resnet-save-epochs", "3"],
        ["--resnet-lr-drops", "3", "4"],
        ["--resnet-lr-drops"],
    ],
)
def test_resnet_flags_are_for_resnet(flags):
    expected = f"{flags[0].split('=')[0]} is for --model=resnet, not for --model=lenet"
    assert refusal("--model=lenet", *flags) == expected


@pytest.mark.parametrize(
    "flags, message",
    [
        ("save-ckpt", "--resnet-save-ckpt was given without --resnet-save-ckpt-path: add it"),
        ("load-ckpt", "--resnet-load-ckpt was given without --resnet-load-ckpt-path: add the"),
        (
            "load-ckpt save-ckpt-path=d",
            "--resnet-load-ckpt was given without --resnet-load-ckpt-epoch-id: add it",
        ),
        (
            "load-ckpt-epoch-id=3",
            "--resnet-load-ckpt-epoch-id was given without --resnet-load-ckpt: add it",
        ),
        ("fine-tune", "--resnet-fine-tune was given without --resnet-load-ckpt: add it"),
        ("save-epochs=3", "--resnet-save-epochs was given without --resnet-save-ckpt: add it"),
        (
            "save-ckpt-path=d",
            "was given, but neither --resnet-save-ckpt nor --resnet-load-ckpt: add one of them",
        ),
        ("width=0", "--resnet-width: it must be at least 1, not 0"),
        ("load-ckpt-epoch-id=last", "a whole number of at least 1, not 'last'"),
    ],
)
def test_a_wrong_use_of_the_resnet_flags_is_told_what_to_add(flags, message):
    argv = [f"--resnet-{flag}" for flag in flags.split()]
    assert message in refusal("--model=resnet", "--solver=sgd", *argv)


@pytest.mark.parametrize("solver", ["svrg", "lp-svrg", "bc-sgd", "bc-svrg"])
def test_only_solvers_without_an_outer_loop_save(solver):
    argv = ["--model=resnet", "--resnet-save-ckpt", "--resnet-save-ckpt-path=d"]
    assert refusal(*argv, f"--solver={solver}") == (
        f"--resnet-save-ckpt is for --solver=sgd or lp-sgd, not for --solver={solver}"
    )


def test_settings_of_resnet_are_none_for_other_models():
    settings = parse(["--model=lenet"])
    assert settings.resnet_width is None
    assert settings.resnet_load_epoch is None
    assert settings.resnet_lr_drops == settings.resnet_save_epochs == ()
    assert parse(["--model=resnet"]).resnet_width == 64
    assert parse(["--model=resnet"]).resnet_lr_drops == ()


@pytest.mark.parametrize("model", ["logreg", "lstm"])
def test_only_images_are_augmented(model):
    data = "conll2000" if model == "lstm" else "digits"
    message = refusal("--augment", f"--model={model}", f"--dataset={data}")
    assert message == f"--augment is for --model=lenet or resnet, not for --model={model}"
    assert parse(["--augment", "--model=lenet"]).augment


def test_the_help_names_defaults_where_there_are_some(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 0.1)" in text and "(default: 0.0)" in text
    assert "(default: None)" not in text and "(default: False)" not in text


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in refusal("--cuda")


@pytest.mark.parametrize(
    "argument, reason",
    [
        ("--alpha=-1", "at least 0, not -1.0"),
        ("--alpha=nan", "finite number of at least 0, not nan"),
        ("--alpha=fast", "a number of at least 0, not 'fast'"),
        ("--momentum=-0.1", "at least 0"),
        ("--reg=-1", "at least 0"),
        ("-T=0", "at least 1, not 0"),
        ("-T=-5", "at least 1, not -5"),
        ("-T=1.5", "a whole number of at least 1, not '1.5'"),
        ("--n-epochs=0", "at least 1"),
        ("--batch-size=0", "at least 1"),
        ("--n-classes=0", "at least 1"),
        ("--limit-train=0", "at least 1"),
        ("--measure-every=0", "at least 1"),
        ("--seed=-1", "0 ... 2147483647, not -1"),
        ("--format=fp17", "unknown format 'fp17'"),
        ("--rounding=sideways", "unknown rounding 'sideways': choose near, "),
        ("--scale=big", "none, auto or a positive number, not 'big'"),
        ("--scale=0", "none, auto or positive, not 0.0"),
        ("--mu=0", "it must be a positive finite number, not 0.0"),
        ("--mu=0.1", "is for --solver=bc-svrg in fixed point (--format=fixed8), not for"),
        ("--offset-dtype=float16", "'float32'"),
        ("--learning-rate=1", "--learning-rate=1"),
        ("--n-epoch=1", "--n-epoch=1"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_the_value_and_what_is_accepted(argument, reason):
    message = refusal(argument)
    assert reason in message
    assert argument.split("=")[0] in message


def test_checkpoints_come_with_an_output_folder_once_an_epoch_unless_said_otherwise():
    assert parse([]).checkpoint_every is None
    assert parse(["--output=out"]).checkpoint_every == "1e"
    for interval in ("1", "500", "2e"):
        flags = ["--output=out", f"--checkpoint-every={interval}"]
        assert parse(flags).checkpoint_every == interval
    for interval in ("0", "-1", "e", "1.5", "2 epochs", "0e"):
        refused = refusal("--output=out", f"--checkpoint-every={interval}")
        assert "it must be a number of steps, as in 500, or of epochs, as in 2e" in refused
