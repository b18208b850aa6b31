"""Texts with labels: WordNet's glosses, or a file of lines for each class."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pictures import DataError

ORDER_SEED = 2026
WORDNET = ("data.noun", "data.verb", "data.adj", "data.adv")
WORDNET_CLASSES = 45
MOST_CHARACTERS = 100_000
"""Of one text: more is taken for a damaged file."""

_SYNSET = re.compile(r"\d{8} (\d\d) .*? \| +(\S.*)")


class LabelledTexts(NamedTuple):
    """Texts for training in random order, and those that are held out."""

    texts: list[str]
    labels: npt.NDArray[np.int64]  # [n], from 0
    test_texts: list[str]
    test_labels: npt.NDArray[np.int64]
    classes: int


def load_texts(data_dir: Path, rows: int | None = None) -> LabelledTexts:
    """Return the texts of a folder, `rows` of those for training (None for all) and the tenth that is held out.

    The folder has either

    - WordNet's data.noun, data.verb, data.adj and data.adv: the glosses, in 45 classes of meaning, or
    - CLASS.txt for each class, UTF-8, a text a line, as neg.txt and pos.txt. Empty lines are skipped.

    A text that occurs more than once is used once, and not at all if it occurs in several classes. Raises DataError.
    """
    if any((data_dir / name).is_file() for name in WORDNET):
        found, classes = _distinct(_glosses(data_dir)), WORDNET_CLASSES
    else:
        files = sorted(data_dir.glob("*.txt"))
        if len(files) < 2:
            raise DataError(data_dir, f"{len(files)} .txt files", f"{', '.join(WORDNET)}, or CLASS.txt for each class")
        found, classes = _distinct(_lines_of_classes(files)), len(files)
    if len(found) < 10:
        raise DataError(data_dir, f"{len(found)} distinct texts", "10 or more")
    order = np.random.default_rng(ORDER_SEED).permutation(len(found))
    held_out = len(found) // 10
    if rows is not None and rows > len(found) - held_out:
        raise DataError(data_dir, f"{len(found) - held_out:,} texts for training", f"{rows:,} or more, as --rows says")
    texts = [found[index][0] for index in order]
    labels = np.array([found[index][1] for index in order], np.int64)
    stop = None if rows is None else held_out + rows
    return LabelledTexts(texts[held_out:stop], labels[held_out:stop], texts[:held_out], labels[:held_out], classes)


def _distinct(found: Iterator[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return each text with its label; without those that have several."""
    labels: dict[str, int | None] = {}
    for text, label in found:
        labels[text] = label if labels.get(text, label) == label else None
    return [(text, label) for text, label in labels.items() if label is not None]


def _glosses(folder: Path) -> Iterator[tuple[str, int]]:
    for name in WORDNET:
        if not (folder / name).is_file():
            raise DataError(folder, f"no {name}", f"{name} beside the others of {', '.join(WORDNET)}")
        for number, line in _lines(folder / name):
            if line.startswith(" "):  # the licence
                continue
            synset = _SYNSET.fullmatch(line.rstrip())
            if synset is None or int(synset[1]) >= WORDNET_CLASSES:
                allowed = f"8 digits, a class from 00 to {WORDNET_CLASSES - 1}, …, a bar and a gloss"
                raise DataError(folder / name, f"{line.strip()[:60]!r} in line {number}", allowed)
            yield synset[2], int(synset[1])


def _lines_of_classes(files: list[Path]) -> Iterator[tuple[str, int]]:
    for label, file in enumerate(files):
        empty = True
        for _, line in _lines(file):
            if text := line.strip():
                yield text, label
                empty = False
        if empty:
            raise DataError(file, "no text", "one text or more, a line each")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of a file."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in text:
                    raise DataError(file, f"a NUL character in line {number}", "text in UTF-8")
                if len(text) > MOST_CHARACTERS:
                    allowed = f"at most {MOST_CHARACTERS:,}, a text a line"
                    raise DataError(file, f"{len(text):,} characters in line {number}", allowed)
                yield number, text
    except UnicodeDecodeError as error:
        raise DataError(file, f"the byte 0x{error.object[error.start]:02x} in line {number}", "text in UTF-8") from None
    except OSError as error:
        raise DataError(file, f"a file that can't be read ({error.strerror})", "text in UTF-8") from None
