"""CoNLL-2000 as published, made into indices of stemmed words and universal tags."""

from __future__ import annotations

import functools
import io
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy

from halp.data.conll2000 import RESERVED, UNKNOWN, TaggedCorpus, TaggedWords
from halp.data.dataset import DataError
from halp.data.fetching import FETCHING_ERRORS, fresh_folder, move_where_nothing_is
from halp.decoding import TextError, lines_of
from halp.messages import SAID, quoted, reason_of, shortened

CORPUS, CORPUS_FILES = "corpora/conll2000", ("train.txt", "test.txt")
TAGSET, TAGSET_FILES = "taggers/universal_tagset", ("en-ptb.map",)

# The universal tagset of Petrov, Das and McDonald (arXiv 1104.2086), sorted.
TAGS = (".", "ADJ", "ADP", "ADV", "CONJ", "DET", "NOUN", "NUM", "PRON", "PRT", "VERB", "X")

Sentence: TypeAlias = list[tuple[str, str]]
"""Words with their tags."""


class _Text(NamedTuple):
    place: str  # for messages
    content: bytes

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield every line without surrounding spaces, after where it is."""
        try:
            for where, line in lines_of(self.content, self.place):
                yield where, line.strip()
        except TextError as error:
            raise DataError(str(error)) from error


def prepare_conll2000(folders: Sequence[Path], download_to: Path) -> TaggedCorpus:
    """Make the corpus that `halp.data.load_conll2000` reads.

    Words are stemmed by Porter's algorithm, which also makes them lower case, and tags mapped to
    the twelve universal ones. The vocabulary is the words that occur at least twice in the training
    set, in order of first appearance, after one index for padding and one for unknown words. Words
    that occur once are unknown: what stands for unknown words is learned from them.

    Args:
        folders: where ``corpora/conll2000`` and ``taggers/universal_tagset`` are looked for, as
            folders or zip files, before the places where nltk keeps its data.
        download_to: folder into which nltk downloads what is found nowhere.

    Raises:
        DataError: a file is neither there nor to be downloaded, or it is damaged; its name and
            the line are given.
    """
    import nltk

    (tagset,) = _package(TAGSET, TAGSET_FILES, folders, download_to)
    universal = _universal_tags(tagset)
    train, test = (
        _sentences(text, universal) for text in _package(CORPUS, CORPUS_FILES, folders, download_to)
    )
    stem: Callable[[str], str] = functools.cache(nltk.stem.PorterStemmer().stem)
    counts = Counter(stem(word) for sentence in train for word, _ in sentence)
    known = [word for word, count in counts.items() if count >= 2]
    indices = {word: index for index, word in enumerate(known, len(RESERVED))}
    return TaggedCorpus(
        train=_indexed(train, stem, indices),
        test=_indexed(test, stem, indices),
        vocabulary=numpy.array([*RESERVED, *indices]),
        tag_names=numpy.array(TAGS),
    )


def _package(
    package: str, names: Sequence[str], folders: Sequence[Path], download_to: Path
) -> list[_Text]:
    """Read files of one of nltk's packages, from the first place that has it."""
    import nltk

    # In its own folder too, so that nothing is downloaded beside what is there already.
    for place in (*folders, download_to, *(Path(place) for place in nltk.data.path if place)):
        texts = _texts(place, package, names)
        if texts is not None:
            return texts
    reason = _download(package, download_to)
    texts = _texts(download_to, package, names)
    if texts is None:
        looked = ", ".join(map(str, dict.fromkeys((*folders, download_to))))
        raise DataError(
            f"{package} is neither where nltk keeps its data nor in {looked}, and could not be "
            f"downloaded: put it into {download_to / package}, or name a folder whose nltk/ or "
            f"nltk_data/ has it with --data-dir or $HALP_DATA (nltk: {reason})"
        )
    return texts


def _texts(place: Path, package: str, names: Sequence[str]) -> list[_Text] | None:
    # Not by nltk.data.find, which refuses files that belong to somebody else: whoever shares
    # them may well be, and text that is checked line by line can do no harm.
    folder, archive = place / package, place / f"{package}.zip"
    source = folder
    try:
        if folder.is_dir():
            return [_Text(str(folder / name), (folder / name).read_bytes()) for name in names]
        source = archive
        if archive.is_file():
            with zipfile.ZipFile(archive) as packed:
                members = {name: f"{folder.name}/{name}" for name in names}
                return [
                    _Text(f"{archive}/{members[name]}", packed.read(members[name]))
                    for name in names
                ]
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise DataError(
            f"{folder} lacks {missing}: put it there, or move the folder away so that it is "
            "downloaded"
        ) from error
    except (OSError, LookupError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{source} cannot be read: {reason_of(error)}") from error
    return None


def _download(package: str, download_to: Path) -> str:
    """Let nltk download a package, whole or not at all; return why that failed, if it did."""
    import nltk

    said = io.StringIO()
    try:
        with warnings.catch_warnings(), fresh_folder(download_to / package) as fresh:
            warnings.simplefilter("ignore")  # of folders that others may write to
            nltk.download(
                Path(package).name,
                download_dir=str(fresh),
                quiet=True,
                raise_on_error=True,
                print_error_to=said,
            )
            for form in (package, f"{package}.zip"):
                if (fresh / form).exists():
                    move_where_nothing_is(fresh / form, download_to / form)
                    break
    except FETCHING_ERRORS as error:
        return reason_of(error)
    return shortened(said.getvalue(), SAID) or "no reason given"


def _universal_tags(text: _Text) -> dict[str, str]:
    """Read the map of Penn Treebank tags to universal ones: a pair in each line."""
    universal: dict[str, str] = {}
    for where, line in text.lines():
        columns = line.split()
        if not columns:
            continue
        if len(columns) != 2 or columns[1] not in TAGS or columns[0] in universal:
            raise DataError(
                f"{where}: a new Penn Treebank tag and one of {' '.join(TAGS)} must stand here, "
                f"not {quoted(line)}"
            )
        universal[columns[0]] = columns[1]
    return universal


def _sentences(text: _Text, universal: dict[str, str]) -> list[Sentence]:
    """Read lines ``word tag chunk``, with an empty line after each sentence."""
    sentences: list[Sentence] = [[]]
    for where, line in text.lines():
        columns = line.split()
        if not columns:
            sentences.append([])
            continue
        if len(columns) != 3:
            raise DataError(
                f"{where}: a word, its tag and its chunk must stand here, not {quoted(line)}"
            )
        word, tag, _ = columns
        if tag not in universal:
            raise DataError(f"{where}: {quoted(tag)} is no tag of the Penn Treebank")
        sentences[-1].append((word, universal[tag]))
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise DataError(f"{text.place} has no sentences")
    return sentences


def _indexed(
    sentences: list[Sentence], stem: Callable[[str], str], indices: dict[str, int]
) -> TaggedWords:
    tokens = [token for sentence in sentences for token in sentence]
    return TaggedWords(
        words=numpy.array([indices.get(stem(word), UNKNOWN) for word, _ in tokens], numpy.int32),
        tags=numpy.array([TAGS.index(tag) for _, tag in tokens], numpy.int8),
        lengths=numpy.array([len(sentence) for sentence in sentences], numpy.int32),
    )
