#!/usr/bin/env python3
"""Prepare CoNLL-2000 for tagging: ``python utils/postag_data_utils.py --help``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from halp.data import DataError
from halp.data.conll2000 import FOLDER, UNKNOWN, TaggedCorpus, write_corpus
from halp.data.conll2000_corpus import prepare_conll2000
from halp.messages import WHOLE, shortened

DATASETS = Path(__file__).resolve().parent.parent / "datasets"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(argv)
    data_dir = Path(args.data_dir or DATASETS)
    output = Path(args.output or data_dir / FOLDER)
    try:
        corpus = prepare_conll2000(_folders(args.data_dir), download_to=data_dir / "nltk")
        file = write_corpus(corpus, output)
    except DataError as mistake:
        print(f"postag_data_utils.py: error: {shortened(mistake, WHOLE)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("postag_data_utils.py: interrupted; no corpus was written", file=sys.stderr)
        return 130
    print(_summary(corpus))
    print(f"written to {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make CoNLL-2000 into the file that --dataset=conll2000 trains on: words "
        "stemmed by Porter's algorithm, tags of the universal tagset."
    )
    parser.add_argument(
        "--data-dir",
        help="folder whose nltk/ or nltk_data/ has the corpus, or gets it by download; "
        "by default those of $HALP_DATA and of the repository's datasets/, then nltk's own places",
    )
    parser.add_argument(
        "--output",
        help="folder to write into; by default conll2000/ in --data-dir, else in datasets/",
    )
    return parser


def _folders(data_dir: str | None) -> list[Path]:
    """Where the corpus is looked for before nltk's own places."""
    parents = [Path(parent) for parent in (data_dir, os.environ.get("HALP_DATA")) if parent]
    return [parent / name for parent in (*parents, DATASETS) for name in ("nltk", "nltk_data")]


def _summary(corpus: TaggedCorpus) -> str:
    train, test = corpus.train, corpus.test
    unknown = (test.words == UNKNOWN).mean()
    return (
        f"sentences   {len(train.lengths)} training, {len(test.lengths)} test\n"
        f"tokens      {len(train.words)} training, {len(test.words)} test\n"
        f"vocabulary  {len(corpus.vocabulary)} with padding and unknown; "
        f"{unknown:.2%} of the test tokens are unknown\n"
        f"tags        {len(corpus.tag_names)}: {' '.join(corpus.tag_names)}"
    )


if __name__ == "__main__":
    sys.exit(main())
