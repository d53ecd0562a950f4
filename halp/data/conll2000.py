"""Part-of-speech tagging on CoNLL-2000, read from the file that ``postag_data_utils.py`` writes."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from halp.data.dataset import IGNORED, DataError, Dataset
from halp.data.fetching import fresh_folder, move_where_nothing_is
from halp.data.sequences import pad_sequences
from halp.messages import reason_of

FOLDER = "conll2000"
FILE = "conll2000.npz"
VERSION = 1
COMMAND = "python utils/postag_data_utils.py"

PADDING, UNKNOWN = 0, 1
"""Indices of what is no word: padding, and any word that the training set has not twice."""
RESERVED = ("<pad>", "<unk>")


@dataclass(frozen=True)
class TaggedWords:
    """Sentences one after the other, as indices."""

    words: numpy.ndarray  # (tokens,), int32, in the vocabulary; never padding
    tags: numpy.ndarray  # (tokens,), int8, in the names of tags
    lengths: numpy.ndarray  # (sentences,), int32, at least 1 each; their sum is the tokens


@dataclass(frozen=True)
class TaggedCorpus:
    """What the file holds."""

    train: TaggedWords
    test: TaggedWords
    vocabulary: numpy.ndarray  # (n_words,), unicode; padding, unknown, then the words
    tag_names: numpy.ndarray  # (n_classes,), unicode


def load_conll2000(data_dir: Path | str, *fallbacks: Path | str) -> Dataset:
    """Load CoNLL-2000 as prepared by ``python utils/postag_data_utils.py``.

    Args:
        data_dir: folder in which ``conll2000/conll2000.npz`` or ``conll2000.npz`` lies.
        fallbacks: folders to look in after it.

    Returns:
        Inputs int64 (N, T), indices of words, of which 0 is padding and 1 any word that the
        training set has not twice; labels int64 (N, T), tags 0 ... 11, `IGNORED` at padding. T is
        the length of the longest sentence. Of the whole data 8936 training and 2012 test
        sentences, in file order.

    Raises:
        DataError: there is no such file, it is damaged, or it is of another version.
    """
    folders = [Path(folder) for folder in (data_dir, *fallbacks)]
    places = [place for folder in folders for place in (folder / FOLDER / FILE, folder / FILE)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise DataError(
            f"CoNLL-2000 is not in {' or '.join(map(str, folders))}: prepare it with `{COMMAND}`, "
            f"or name the folder that has {FOLDER}/{FILE} with --data-dir or $HALP_DATA"
        )
    corpus = read_corpus(file)
    longest = int(max(part.lengths.max() for part in (corpus.train, corpus.test)))
    train_inputs, train_labels = _padded(corpus.train, longest)
    test_inputs, test_labels = _padded(corpus.test, longest)
    return Dataset(
        name="conll2000",
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        n_classes=len(corpus.tag_names),
        n_words=len(corpus.vocabulary),
    )


def write_corpus(corpus: TaggedCorpus, folder: Path) -> Path:
    """Write a corpus into ``folder``, which is made if need be; the same corpus as the same bytes.

    The file appears whole or not at all. One that is there stays, whatever it holds.

    Returns:
        The file that holds the corpus.

    Raises:
        DataError: it cannot be written, or something else is there.
    """
    arrays = {"version": numpy.array(VERSION, dtype=numpy.int32)}
    for name, part in (("train", corpus.train), ("test", corpus.test)):
        arrays |= {f"{name}_{field}": values for field, values in vars(part).items()}
    arrays |= {"vocabulary": corpus.vocabulary, "tag_names": corpus.tag_names}
    file = folder / FILE
    try:
        with fresh_folder(file) as fresh:
            with (fresh / FILE).open("wb") as stream:
                numpy.savez_compressed(stream, allow_pickle=False, **arrays)
            move_where_nothing_is(fresh / FILE, file)
    except OSError as error:
        if not isinstance(error, FileExistsError) or not os.path.lexists(file):
            raise DataError(
                f"{file} cannot be written, name another folder with --output ({reason_of(error)})"
            ) from error
        if not _same(read_corpus(file), corpus):
            raise DataError(
                f"{file} is there already, holds another corpus and is not overwritten: move it "
                "away, or name another folder with --output"
            ) from error
    return file


def _same(one: TaggedCorpus, other: TaggedCorpus) -> bool:
    pairs = [(one.vocabulary, other.vocabulary), (one.tag_names, other.tag_names)]
    for part in ("train", "test"):
        ours, theirs = vars(getattr(one, part)), vars(getattr(other, part))
        pairs += [(ours[field], theirs[field]) for field in ours]
    return all(map(numpy.array_equal, *zip(*pairs, strict=True)))


def read_corpus(file: Path) -> TaggedCorpus:
    """Read what `write_corpus` wrote.

    Raises:
        DataError: the file is damaged, of another version or something else.
    """
    advice = f"move it away and write it anew with `{COMMAND}`"
    try:
        with _opened(file) as arrays:
            version = arrays["version"]
            if version.shape != () or version.dtype.kind not in "iu":
                raise ValueError(f"its version is {version.dtype} of shape {version.shape}")
            if version != VERSION:
                raise DataError(
                    f"{file} has format version {version}, but this halp reads {VERSION}: {advice}"
                )
            corpus = TaggedCorpus(
                train=_part(arrays, "train"),
                test=_part(arrays, "test"),
                vocabulary=_array(arrays, "vocabulary", "U"),
                tag_names=_array(arrays, "tag_names", "U"),
            )
        _check(corpus)
    except DataError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        MemoryError,
        NotImplementedError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{file} is damaged or no prepared CoNLL-2000: {advice} ({reason_of(error)})"
        ) from error
    return corpus


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    arrays = numpy.load(file, allow_pickle=False)
    if not isinstance(arrays, numpy.lib.npyio.NpzFile):
        raise ValueError("it is a single array")
    with arrays:
        yield arrays


def _part(arrays: Any, name: str) -> TaggedWords:
    return TaggedWords(
        words=_array(arrays, f"{name}_words", "i"),
        tags=_array(arrays, f"{name}_tags", "i"),
        lengths=_array(arrays, f"{name}_lengths", "i"),
    )


def _array(arrays: Any, name: str, kind: str) -> numpy.ndarray:
    array: numpy.ndarray = arrays[name]
    if array.ndim != 1 or array.dtype.kind != kind or len(array) == 0:
        raise ValueError(f"{name} is {array.dtype} of shape {array.shape}")
    return array


def _check(corpus: TaggedCorpus) -> None:
    if tuple(corpus.vocabulary[: len(RESERVED)]) != RESERVED:
        raise ValueError(f"the vocabulary does not begin with {' and '.join(RESERVED)}")
    for name, part in (("train", corpus.train), ("test", corpus.test)):
        for values, low, high, what in (
            (part.lengths, 1, len(part.words), "lengths"),
            (part.words, PADDING + 1, len(corpus.vocabulary) - 1, "words"),
            (part.tags, 0, len(corpus.tag_names) - 1, "tags"),
        ):
            if values.min() < low or values.max() > high:
                raise ValueError(f"{name}_{what} do not lie in {low} ... {high}")
        total = int(part.lengths.sum(dtype=numpy.int64))
        if not len(part.words) == len(part.tags) == total:
            raise ValueError(
                f"{name} has {len(part.words)} words, {len(part.tags)} tags and {total} tokens"
            )


def _padded(part: TaggedWords, width: int) -> tuple[Tensor, Tensor]:
    words, tags, lengths = (
        torch.from_numpy(values.astype(numpy.int64))
        for values in (part.words, part.tags, part.lengths)
    )
    return (
        pad_sequences(words, lengths, width, PADDING),
        pad_sequences(tags, lengths, width, IGNORED),
    )
