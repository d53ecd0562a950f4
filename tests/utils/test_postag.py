"""Claims about the script that prepares CoNLL-2000, each run as a person would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halp.data import load_conll2000, units
from halp.data.conll2000 import write_corpus
from halp.data.conll2000_corpus import prepare_conll2000
from tests.data.corpora import write_corpus_files

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "utils" / "postag_data_utils.py"


def run(*argv, cwd: Path, halp_data: Path | str = "") -> subprocess.CompletedProcess:
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"HALP_DATA": str(halp_data)}
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, argv)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["nltk", "nltk_data"])
def test_a_corpus_of_the_data_folder_is_prepared_beside_it(tmp_path, name):
    write_corpus_files(tmp_path / name)
    done = run("--data-dir", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    data = load_conll2000(tmp_path)
    assert (len(data.train_labels), len(data.test_labels)) == (2, 2)
    assert data.n_words == 4
    assert done.stdout.splitlines() == [
        "sentences   2 training, 2 test",
        "tokens      8 training, 3 test",
        "vocabulary  4 with padding and unknown; 66.67% of the test tokens are unknown",
        "tags        12: . ADJ ADP ADV CONJ DET NOUN NUM PRON PRT VERB X",
        f"written to {tmp_path / 'conll2000' / 'conll2000.npz'}",
    ]


def test_the_corpus_of_halp_data_is_written_where_output_says(tmp_path):
    write_corpus_files(tmp_path / "data" / "nltk_data")
    done = run("--output", "some/where", cwd=tmp_path, halp_data=tmp_path / "data")
    assert (done.returncode, done.stderr) == (0, "")
    assert load_conll2000(tmp_path / "some" / "where").n_words == 4
    assert os.listdir(tmp_path / "data") == ["nltk_data"]


def test_the_named_folder_goes_before_halp_data(tmp_path):
    write_corpus_files(tmp_path / "named" / "nltk", train=2 * "the DT B-NP\n")
    write_corpus_files(tmp_path / "data" / "nltk_data")
    run("--data-dir", tmp_path / "named", cwd=tmp_path, halp_data=tmp_path / "data")
    assert load_conll2000(tmp_path / "named").n_words == 3


def test_it_says_what_is_wrong_in_one_line_and_writes_nothing(tmp_path):
    write_corpus_files(tmp_path / "nltk", test="in IN\n")
    done = run("--data-dir", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"postag_data_utils.py: error: {tmp_path / 'nltk/corpora/conll2000/test.txt'}, line 1: "
        "a word, its tag and its chunk must stand here, not 'in IN'\n"
    )
    assert os.listdir(tmp_path) == ["nltk"]


def test_help_names_the_flags(tmp_path):
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--data-dir" in done.stdout
    assert "--output" in done.stdout


def test_the_real_corpus_has_its_published_counts(halp_data, tmp_path):
    if not (halp_data / "nltk_data").is_dir():
        pytest.skip(f"needs {halp_data / 'nltk_data'}")
    done = run("--output", tmp_path, cwd=REPOSITORY, halp_data=halp_data)
    assert done.returncode == 0
    assert "sentences   8936 training, 2012 test" in done.stdout
    data = load_conll2000(tmp_path)
    assert (len(data.train_labels), len(data.test_labels)) == (8936, 2012)
    assert (units(data.train_labels), units(data.test_labels)) == (211727, 47377)
    assert (data.n_classes, data.n_words) == (12, 6762)


def test_another_prepared_corpus_is_not_overwritten(tmp_path):
    nltk = tmp_path / "nltk"
    write_corpus_files(nltk)
    prepared = write_corpus(prepare_conll2000([nltk], nltk), tmp_path / "conll2000")
    before = prepared.read_bytes()
    write_corpus_files(nltk, train=2 * "the DT B-NP\n")
    done = run("--data-dir", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{prepared} is there already, holds another corpus" in done.stderr
    assert prepared.read_bytes() == before
