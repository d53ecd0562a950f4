"""Making indices of CoNLL-2000: of a small corpus, and of the real one against nltk's."""

from collections import Counter
from pathlib import Path

import nltk
import pytest

from halp.data import DataError
from halp.data.conll2000 import TaggedCorpus, TaggedWords
from halp.data.conll2000_corpus import TAGS, prepare_conll2000
from tests.data.corpora import MAP, TEST, TRAIN, write_corpus_files, zip_packages


@pytest.fixture
def no_network(monkeypatch):
    """Nothing of nltk's own on this machine, and nothing to be downloaded."""

    def fail(*args, **kwargs):
        raise ValueError("Error loading:\n no network")

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", fail)


@pytest.fixture
def prepared(tmp_path, no_network):
    def prepare(**files) -> TaggedCorpus:
        write_corpus_files(tmp_path / "nltk", **files)
        return prepare_conll2000([tmp_path / "nltk"], download_to=tmp_path / "downloads")

    return prepare


def sentences(part: TaggedWords, names, values) -> list[list[str]]:
    tokens = iter(values.tolist())
    return [[str(names[next(tokens)]) for _ in range(length)] for length in part.lengths]


# A small corpus.


def test_stems_that_occur_twice_are_indexed_in_order_of_appearance(prepared):
    corpus = prepared()
    assert corpus.vocabulary.tolist() == ["<pad>", "<unk>", "the", "pound"]
    assert corpus.train.words.tolist() == [1, 1, 2, 3, 1, 2, 3, 1]
    assert corpus.train.lengths.tolist() == [5, 3]


def test_test_words_that_the_training_set_has_not_twice_are_unknown(prepared):
    corpus = prepared()
    assert corpus.test.words.tolist() == [3, 1, 1]
    assert corpus.test.lengths.tolist() == [2, 1]


def test_tags_are_the_universal_ones(prepared):
    corpus = prepared()
    assert corpus.tag_names.tolist() == sorted(corpus.tag_names) == list(TAGS)
    assert sentences(corpus.train, corpus.tag_names, corpus.train.tags) == [
        ["NOUN", "ADP", "DET", "NOUN", "."],
        ["DET", "NOUN", "VERB"],
    ]


def test_a_word_spelled_like_padding_is_a_word(prepared):
    corpus = prepared(train=2 * "<pad> NN B-NP\n<unk> NN B-NP\n")
    assert corpus.train.words.tolist() == [2, 3, 2, 3]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_ends_of_either_kind_are_read(prepared, ending):
    corpus = prepared(train=TRAIN.replace("\n", ending), tags=MAP.replace("\n", ending))
    assert corpus.train.lengths.tolist() == [5, 3]


def test_packages_that_nltk_left_packed_are_read(prepared, tmp_path):
    expected = prepared()
    zip_packages(tmp_path / "nltk")
    corpus = prepare_conll2000([tmp_path / "nltk"], tmp_path / "downloads")
    assert corpus.train.words.tolist() == expected.train.words.tolist()


def test_the_first_folder_counts_and_nltks_own_places_come_last(prepared, tmp_path, monkeypatch):
    write_corpus_files(tmp_path / "other", train="one CD B-NP\n", tags=MAP + "CD\tNUM\n")
    monkeypatch.setattr(nltk.data, "path", ["", str(tmp_path / "other")])
    assert len(prepared().train.words) == 8
    assert len(prepare_conll2000([], tmp_path / "downloads").train.words) == 1


# What is refused.


def refusal(prepared, **files) -> str:
    with pytest.raises(DataError) as refused:
        prepared(**files)
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("in IN", "a word, its tag and its chunk must stand here, not 'in IN'"),
        ("in", "must stand here, not 'in'"),
        ("in IN B-PP x", "must stand here, not 'in IN B-PP x'"),
        ("in QQ B-PP", "'QQ' is no tag of the Penn Treebank"),
        (b"caf\xe9 NN B-NP", "the byte 0xe9 is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named(prepared, tmp_path, line, complaint):
    raw = line if isinstance(line, bytes) else line.encode()
    message = refusal(prepared, test=b"fell VBD B-VP\n\n" + raw + b"\n")
    assert f"{tmp_path / 'nltk/corpora/conll2000/test.txt'}, line 3: " in message
    assert complaint in message


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(prepared, content):
    assert "train.txt has no sentences" in refusal(prepared, train=content)


@pytest.mark.parametrize("line", ["NN", "CD\tNUMBER", "NN\tNOUN", "CD\tNUM\tx"])
def test_a_wrong_line_of_the_tagset_is_named(prepared, line):
    assert f"en-ptb.map, line 8: a new Penn Treebank tag and one of {' '.join(TAGS)} must" in (
        refusal(prepared, tags=f"{MAP}{line}\n")
    )


def test_a_missing_file_is_named(prepared, tmp_path):
    prepared()
    (tmp_path / "nltk/corpora/conll2000/test.txt").unlink()
    with pytest.raises(DataError, match="conll2000 lacks test.txt"):
        prepare_conll2000([tmp_path / "nltk"], tmp_path / "downloads")


def test_a_damaged_zip_file_is_named(prepared, tmp_path):
    prepared()
    zip_packages(tmp_path / "nltk")
    archive = tmp_path / "nltk/corpora/conll2000.zip"
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"conll2000.zip cannot be read"):
        prepare_conll2000([tmp_path / "nltk"], tmp_path / "downloads")


# Downloads.


def test_a_corpus_that_cannot_be_downloaded_gives_one_sentence(tmp_path, no_network):
    with pytest.raises(DataError) as refused:
        prepare_conll2000([tmp_path / "empty"], tmp_path / "downloads")
    message = str(refused.value)
    assert f"put it into {tmp_path / 'downloads/taggers/universal_tagset'}" in message
    assert str(tmp_path / "empty") in message
    assert "no network" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_downloaded(tmp_path, no_network, monkeypatch):
    asked = []

    def download(package, download_dir, **kwargs):
        asked.append(package)
        write_corpus_files(Path(download_dir))

    monkeypatch.setattr(nltk, "download", download)
    corpus = prepare_conll2000([tmp_path / "empty"], tmp_path / "downloads")
    assert asked == ["universal_tagset", "conll2000"]
    assert corpus.train.lengths.tolist() == [5, 3]


# The real corpus.


def test_the_real_corpus_has_the_words_and_tags_that_nltk_reads(halp_data, monkeypatch):
    folder = halp_data / "nltk_data"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    corpus = prepare_conll2000([folder], download_to=folder)
    monkeypatch.setattr(nltk.data, "path", [str(folder)])
    stem = nltk.stem.PorterStemmer().stem
    known: set[str] = set()
    for name, part in (("train", corpus.train), ("test", corpus.test)):
        tagged = nltk.corpus.conll2000.tagged_sents(f"{name}.txt", tagset="universal")
        expected = [[(stem(word), tag) for word, tag in sentence] for sentence in tagged]
        if name == "train":
            counts = Counter(word for sentence in expected for word, _ in sentence)
            known = {word for word, count in counts.items() if count > 1}
        words = sentences(part, corpus.vocabulary, part.words)
        tags = sentences(part, corpus.tag_names, part.tags)
        assert tags == [[tag for _, tag in sentence] for sentence in expected]
        assert words == [
            [word if word in known else "<unk>" for word, _ in sentence] for sentence in expected
        ]
    assert [len(part.lengths) for part in (corpus.train, corpus.test)] == [8936, 2012]
    assert [len(part.words) for part in (corpus.train, corpus.test)] == [211727, 47377]
    assert len(corpus.vocabulary) == len(known) + 2


# Text from elsewhere.

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("name", ["train", "test", "tags"])
@pytest.mark.parametrize(
    "encode",
    [
        lambda text: BOM + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: text.replace("\n", "\r\r\n").encode(),
        lambda text: text.rstrip("\n").encode(),
    ],
    ids=["byte-order mark", "UTF-16", "CR", "CR CR LF", "no final line end"],
)
def test_how_a_file_was_saved_changes_no_index(prepared, name, encode):
    files = {"train": TRAIN, "test": "The DT B-NP\npounds NNS B-NP\n\nin IN O\n", "tags": MAP}
    expected = prepared(**files)
    corpus = prepared(**files | {name: encode(files[name])})
    assert corpus.vocabulary.tolist() == expected.vocabulary.tolist()
    for part, known in ((corpus.train, expected.train), (corpus.test, expected.test)):
        assert part.words.tolist() == known.words.tolist()
        assert part.tags.tolist() == known.tags.tolist()
        assert part.lengths.tolist() == known.lengths.tolist()


def test_a_byte_order_mark_in_a_zip_file_is_no_part_of_the_first_word(prepared, tmp_path):
    prepared(train=BOM + 2 * b"the DT B-NP\n", test=BOM + b"the DT B-NP\n")
    zip_packages(tmp_path / "nltk")
    corpus = prepare_conll2000([tmp_path / "nltk"], tmp_path / "downloads")
    assert corpus.vocabulary.tolist() == ["<pad>", "<unk>", "the"]
    assert corpus.test.words.tolist() == [2]


@pytest.mark.parametrize("content", [b"in IN B-PP\x00\n", "in IN B-PP\n".encode("utf-16-le")])
def test_a_nul_character_is_refused_with_its_file_and_line(prepared, content):
    assert "test.txt, line 1: there is a NUL character" in refusal(prepared, test=content)


@pytest.mark.parametrize(
    "files", [{"train": "x " * 10**5}, {"train": f"a {'T' * 10**5} c"}, {"tags": "x " * 10**5}]
)
def test_a_refused_line_is_not_quoted_at_length(prepared, files):
    message = refusal(prepared, **files)
    assert len(message) < 600
    assert " characters)" in message


# What a user put there.


def test_what_lies_where_downloads_go_is_read(tmp_path, no_network):
    write_corpus_files(tmp_path / "downloads")
    assert prepare_conll2000([], tmp_path / "downloads").train.lengths.tolist() == [5, 3]


@pytest.mark.parametrize("packed", [False, True])
def test_a_download_replaces_nothing_that_appears_meanwhile(
    tmp_path, no_network, monkeypatch, packed
):
    place = tmp_path / "downloads"

    def download(package, download_dir, **kwargs):
        write_corpus_files(Path(download_dir))
        write_corpus_files(place, train="mine NN B-NP\n")
        if packed:
            zip_packages(Path(download_dir))

    monkeypatch.setattr(nltk, "download", download)
    corpus = prepare_conll2000([], place)
    assert corpus.train.lengths.tolist() == [1]
    assert (place / "corpora/conll2000/train.txt").read_text() == "mine NN B-NP\n"


def test_a_download_that_fails_halfway_leaves_nothing(tmp_path, no_network, monkeypatch):
    def download(package, download_dir, **kwargs):
        write_corpus_files(Path(download_dir))
        raise ValueError("connection lost")

    monkeypatch.setattr(nltk, "download", download)
    with pytest.raises(DataError, match="connection lost"):
        prepare_conll2000([], tmp_path / "downloads")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=repr)
@pytest.mark.parametrize("mark", [b"", BOM], ids=["plain", "byte-order mark"])
def test_marks_and_line_ends_of_any_system_change_nothing(prepared, mark, end):
    def written(text: str) -> bytes:
        return mark + text.rstrip("\n").replace("\n", end).encode()

    expected = prepared()
    corpus = prepared(train=written(TRAIN), test=written(TEST), tags=written(MAP))
    assert corpus.vocabulary.tolist() == expected.vocabulary.tolist()
    for part, other in ((corpus.train, expected.train), (corpus.test, expected.test)):
        assert part.words.tolist() == other.words.tolist()
        assert part.tags.tolist() == other.tags.tolist()
        assert part.lengths.tolist() == other.lengths.tolist()


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"the DT B-NP\n\0\0\n", r"train\.txt, line 2: there is a NUL character"),
        ("caf\xe9 NN B-NP\n".encode("latin-1"), r"train\.txt, line 1: the byte 0xe9 is not UTF-8"),
        (b"x" * 300_000, r"train\.txt, line 1: a word, its tag .* \(300000 characters\)"),
        (b"a " + b"N" * 300_000 + b" B-NP", r"line 1: 'NNN.* is no tag of the Penn Treebank"),
    ],
    ids=["zero", "latin-1", "long line", "long tag"],
)
def test_what_is_no_such_text_is_refused_in_a_short_sentence(prepared, content, reason):
    with pytest.raises(DataError, match=reason) as refused:
        prepared(train=content)
    assert len(str(refused.value)) < 400
