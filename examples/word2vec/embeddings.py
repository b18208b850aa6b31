"""The files of the tutorial: a dictionary of words, and the table of their embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]  # [words, width]

WORD_DICT = "word_dict"
"""Lines of a word, a space and its id."""

EMBEDDING_TABLE = "embedding_table"
"""Lines of numbers with commas between them, by numpy's savetxt: line 0 is the word with id 0."""


class EmbeddingError(Exception):
    """Raised for files that are no dictionary and table of embeddings, or do not belong together."""


def save_words(folder: Path, words: list[str]) -> None:
    """Write the dictionary, of words in the order of their ids, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WORD_DICT).write_text("".join(f"{word} {number}\n" for number, word in enumerate(words)), "utf-8")


def load_words(folder: Path) -> list[str]:
    """Return the words of a dictionary in the order of their ids, whatever that of its lines. Raises EmbeddingError."""
    words = {}
    try:
        lines = (folder / WORD_DICT).read_text("utf-8").splitlines()
        for line in lines:
            word, number = line.split(" ")
            words[int(number)] = word
    except (OSError, ValueError) as error:  # also text that is not UTF-8
        raise EmbeddingError(f"no dictionary: {error}") from None
    if not words or words.keys() != set(range(len(lines))):
        raise EmbeddingError(f"{folder / WORD_DICT}: got {len(lines)} lines, allowed is each id from 0 on once")
    return [words[number] for number in range(len(words))]


def save_embeddings(folder: Path, words: list[str], table: Table) -> None:
    """Write both files into a folder."""
    save_words(folder, words)
    np.savetxt(folder / EMBEDDING_TABLE, table, delimiter=",")


def load_embeddings(folder: Path) -> tuple[list[str], Table]:
    """Return the words and their embeddings. Raises EmbeddingError."""
    words = load_words(folder)
    try:
        table = np.loadtxt(folder / EMBEDDING_TABLE, np.float32, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise EmbeddingError(f"no embeddings: {error}") from None
    if len(table) != len(words):
        raise EmbeddingError(f"{folder}: {len(table)} embeddings do not belong to {len(words)} words")
    return words, table


def nearest(words: list[str], table: Table, word: str, most: int = 5) -> list[tuple[str, float]]:
    """Return the words whose embeddings have the smallest angle to that of `word`, with its cosine, the nearest first.

    Raises EmbeddingError for a word that is not in the dictionary.
    """
    if word not in words:
        raise EmbeddingError(f"{word!r} is not among the {len(words)} words of the dictionary")
    directions = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    own = words.index(word)
    cosines = directions @ directions[own]
    order = [index for index in np.argsort(-cosines, kind="stable") if index != own]
    return [(words[index], float(cosines[index])) for index in order[:most]]
