"""The readers of the text example: WordNet's files and files of lines, whole and damaged; and its tokenizer."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.paths import EXAMPLES, SUPPORT

WORDNET = SUPPORT / "texts" / "wordnet"
CHINESE = SUPPORT / "texts" / "chinese"
NOUN = "00001740 03 n 01 entity 0 001 ~ 00001930 n 0000 | that which exists  \n"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's folder and those that it shares are where its scripts look for modules."""
    before = set(sys.modules)
    folders = [str(EXAMPLES / name) for name in ("text_distill", "vision_distill", "mnist_distill")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    yield
    for name in {"texts", "tokens", "pictures", "digits"} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def texts(example: None) -> ModuleType:  # noqa: ARG001 -- makes it importable
    import texts

    return texts


@pytest.fixture
def tokens(example: None) -> ModuleType:  # noqa: ARG001 -- makes it importable
    import tokens

    return tokens


def write_lines(folder: Path, good: bytes) -> None:
    """Write good.txt, and a whole bad.txt."""
    (folder / "good.txt").write_bytes(good)
    (folder / "bad.txt").write_text("".join(f"bad {number}\n" for number in range(20)))


def test_glosses_of_wordnet_have_the_class_of_their_line(texts: ModuleType) -> None:
    """A tenth is held out, in an order that is random and the same each time; the licence is no text."""
    found = texts.load_texts(WORDNET)
    assert (len(found.texts), len(found.test_texts), found.classes) == (1007, 111, 45)
    everything = dict(zip(found.texts + found.test_texts, np.append(found.labels, found.test_labels), strict=True))
    assert everything["of or relating to antigens"] == 1
    assert not any("Princeton" in text for text in everything)
    few = texts.load_texts(WORDNET, 50)
    assert few.texts == found.texts[:50]
    assert few.test_texts == found.test_texts


def test_each_text_is_used_once_and_only_with_one_label(texts: ModuleType, tmp_path: Path) -> None:
    """Repeated lines can't be both trained on and held out; empty ones and a byte order mark are no text."""
    write_lines(tmp_path, "\ufeffone\r\n one \n\nbad 7\ntwo".encode())
    found = texts.load_texts(tmp_path)
    labels = dict(zip(found.texts + found.test_texts, np.append(found.labels, found.test_labels), strict=True))
    assert {text for text, label in labels.items() if label == 1} == {"one", "two"}
    assert "bad 7" not in labels
    assert len(labels) == 21


LINES = [
    (b"\xff\xfeg\x00", r"good.txt: got the byte 0xff in line 1, allowed is text in UTF-8"),
    ("first\n书\n".encode("gb18030"), r"good.txt: got the byte 0xca in line 2"),
    (b"one\nt\0wo\n", r"good.txt: got a NUL character in line 2"),
    (b"\n \n", r"good.txt: got no text, allowed is one text or more"),
    (b"x" * 100_001, r"good.txt: got 100,001 characters in line 1, allowed is at most 100,000"),
]


@pytest.mark.parametrize(("content", "complaint"), LINES)
def test_files_that_are_no_lines_of_text_are_refused(
    texts: ModuleType, tmp_path: Path, content: bytes, complaint: str
) -> None:
    """The error names the file, the line and what is allowed."""
    write_lines(tmp_path, content)
    with pytest.raises(texts.DataError, match=complaint):
        texts.load_texts(tmp_path)


GLOSSES = [
    (NOUN.replace(" | ", "   "), r"data.noun: got '00001740 03 .*' in line 31, allowed is 8 digits, a class from 00"),
    (NOUN.replace(" 03 ", " 45 "), "'00001740 45 .*' in line 31"),
    (NOUN.replace("that which exists", ""), "in line 31"),
    (NOUN[4:], "'1740 03 .*' in line 31"),
    ("\n", "'' in line 31"),
]


@pytest.mark.parametrize(("line", "complaint"), GLOSSES)
def test_a_damaged_line_of_wordnet_is_refused(texts: ModuleType, tmp_path: Path, line: str, complaint: str) -> None:
    """With its beginning; nothing is left out silently."""
    for file in WORDNET.iterdir():
        shutil.copy(file, tmp_path)
    lines = (tmp_path / "data.noun").read_text().splitlines(keepends=True)
    lines[30] = line
    (tmp_path / "data.noun").write_text("".join(lines))
    with pytest.raises(texts.DataError, match=complaint):
        texts.load_texts(tmp_path)


def test_folders_that_have_not_what_is_needed_are_refused(texts: ModuleType, tmp_path: Path) -> None:
    """One class, too few texts, a file of WordNet without the others, more rows than there are."""

    def refused(complaint: str, rows: int | None = None) -> None:
        with pytest.raises(texts.DataError, match=complaint):
            texts.load_texts(tmp_path, rows)

    refused("got 0 .txt files, allowed is data.noun, .*, or CLASS.txt for each class")
    (tmp_path / "good.txt").write_text("one\n")
    refused("got 1 .txt files")
    (tmp_path / "bad.txt").write_text("two\n")
    refused("got 2 distinct texts, allowed is 10 or more")
    write_lines(tmp_path, b"one\n")
    refused("got 19 texts for training, allowed is 20 or more, as --rows says", rows=20)
    (tmp_path / "good.txt").unlink()
    (tmp_path / "good.txt").mkdir()
    refused(r"good.txt: got a file that can't be read \(Is a directory\)")
    (tmp_path / "data.noun").write_text(NOUN)
    refused("got no data.verb, allowed is data.verb beside the others")


def test_texts_become_words_characters_or_pairs(tokens: ModuleType) -> None:
    """Chinese is not separated by spaces."""
    assert tokens.words("It's full of Rackets, 12 balls") == ["it", "s", "full", "of", "rackets", "12", "balls"]
    assert tokens.characters("很好 OK") == ["很", "好", "o", "k"]
    assert tokens.pairs("非常 满意") == ["非常", "常满", "满意"]


def test_a_vocabulary_is_learnt_from_the_frequent_tokens(texts: ModuleType, tokens: ModuleType, tmp_path: Path) -> None:
    """The same texts give the same file, and it comes back; others are unknown, and short texts are padded."""
    found = texts.load_texts(CHINESE)
    tokenizer = tokens.Tokenizer.learn(found.texts, "characters", 6, most=50)
    assert tokenizer == tokens.Tokenizer.learn(found.texts[::-1], "characters", 6, most=50)
    file = tmp_path / tokens.FILE
    file.write_text(tokenizer.to_json(), "utf-8")
    assert tokens.Tokenizer.load(file) == tokenizer
    assert len(tokenizer.vocabulary) == 52
    most_frequent = tokenizer.vocabulary[2]
    numbers = tokenizer.encode([f"{most_frequent}龘", most_frequent * 9, " "])
    assert numbers.tolist() == [[2, 1, 0, 0, 0, 0], [2] * 6, [1, 0, 0, 0, 0, 0]]
    assert tokens.Tokenizer.learn(["a a b"], "words", 6, most=50).vocabulary == ("", "?", "a")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"split": "words", "length": 24}',
        b'{"split": "sentences", "length": 24, "vocabulary": ["", "?"]}',
        b'{"split": "words", "length": 0, "vocabulary": ["", "?"]}',
        b'{"split": "words", "length": true, "vocabulary": ["", "?"]}',
        b'{"split": "words", "length": 1e9, "vocabulary": ["", "?"]}',
        b'{"split": "words", "length": 24, "vocabulary": ["", 3]}',
        b'{"split": "words", "length": 24, "vocabulary": "abc"}',
        b"[" * 200_000,
        None,
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tokens: ModuleType, tmp_path: Path, content: bytes | None) -> None:
    """With where a tokenizer comes from."""
    file = tmp_path / tokens.FILE
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(
        tokens.DataError, match=r"tokenizer.json: got no tokenizer, allowed is .* that train_teacher.py"
    ):
        tokens.Tokenizer.load(file)
