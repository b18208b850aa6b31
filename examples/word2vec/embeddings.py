"""The files of the tutorial: a dictionary of words, and the table of their embeddings."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]  # [words, width]

WORD_DICT = "word_dict"
"""One word a line, in the order of their ids."""

EMBEDDING_TABLE = "embedding_table"
"""A parameter as Paddle's v2 API wrote it: a header, and the numbers row by row."""

_HEADER = struct.Struct("<iIQ")
"""Version, bytes of a number, and how many numbers."""

_VERSION, _SIZE = 0, 4


class EmbeddingError(Exception):
    """Raised for files that are no dictionary and table of embeddings, or do not belong together."""


def save_words(folder: Path, words: list[str]) -> None:
    """Write the dictionary into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WORD_DICT).write_text("".join(f"{word}\n" for word in words), "utf-8")


def load_words(folder: Path) -> list[str]:
    """Return the words of a dictionary. Raises EmbeddingError."""
    try:
        return (folder / WORD_DICT).read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise EmbeddingError(f"no dictionary: {error}") from None


def save_embeddings(folder: Path, words: list[str], table: Table) -> None:
    """Write both files into a folder."""
    save_words(folder, words)
    numbers = np.ascontiguousarray(table, "<f4")
    (folder / EMBEDDING_TABLE).write_bytes(_HEADER.pack(_VERSION, _SIZE, numbers.size) + numbers.tobytes())


def load_embeddings(folder: Path) -> tuple[list[str], Table]:
    """Return the words and their embeddings. Raises EmbeddingError."""
    words = load_words(folder)
    try:
        content = (folder / EMBEDDING_TABLE).read_bytes()
    except OSError as error:
        raise EmbeddingError(f"no embeddings: {error}") from None
    version, size, count = _HEADER.unpack(content[: _HEADER.size].ljust(_HEADER.size, b"\xff"))
    if (version, size) != (_VERSION, _SIZE) or len(content) != _HEADER.size + size * count:
        raise EmbeddingError(
            f"{folder / EMBEDDING_TABLE}: got {len(content)} bytes with the header {(version, size, count)}, allowed "
            f"is version {_VERSION}, numbers of {_SIZE} bytes, and as many as there are"
        )
    if not words or count % len(words):
        raise EmbeddingError(f"{folder}: {count} numbers can't be shared by {len(words)} words")
    return words, np.frombuffer(content, "<f4", offset=_HEADER.size).reshape(len(words), -1)


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
