"""A small corpus in the layout of nltk's data, for tests."""

from __future__ import annotations

import zipfile
from pathlib import Path

TRAIN = """\
Confidence NN B-NP
in IN B-PP
the DT B-NP
pounds NNS I-NP
. . O

The DT B-NP
pound NN I-NP
widened VBD B-VP
"""
TEST = "Pounds NNS B-NP\nfell VBD B-VP\n\n. . O\n\n\n"
MAP = "IN\tADP\nDT\tDET\nNN\tNOUN\nNNS\tNOUN\nVBD\tVERB\n.\t.\nFW\tX\n"


def write_corpus_files(
    nltk_data: Path, train: str | bytes = TRAIN, test: str | bytes = TEST, tags: str | bytes = MAP
) -> None:
    """Write the three files under ``nltk_data``."""
    for name, content in (
        ("corpora/conll2000/train.txt", train),
        ("corpora/conll2000/test.txt", test),
        ("taggers/universal_tagset/en-ptb.map", tags),
    ):
        file = nltk_data / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def zip_packages(nltk_data: Path) -> None:
    """Replace both folders by zip files, which is how nltk leaves some downloads."""
    for package in (nltk_data / "corpora/conll2000", nltk_data / "taggers/universal_tagset"):
        with zipfile.ZipFile(f"{package}.zip", "w") as archive:
            for file in sorted(package.iterdir()):
                archive.write(file, f"{package.name}/{file.name}")
                file.unlink()
        package.rmdir()
