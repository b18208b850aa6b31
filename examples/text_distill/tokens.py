"""Makes numbers of texts, by a vocabulary that is learnt from the texts for training and kept beside the model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pictures import DataError

Tokens = npt.NDArray[np.int64]  # [n, length]

FILE = "tokenizer.json"
"""In a model's folder; `edl teacher` announces its digest."""

PADDING, UNKNOWN = 0, 1

LONGEST = 1024
"""Most tokens of a text."""

_WORD = re.compile(r"[^\W\d_]+|\d+")


def words(text: str) -> list[str]:
    """Return the words and numbers of a text, in small letters."""
    return _WORD.findall(text.lower())


def characters(text: str) -> list[str]:
    """Return the characters of a text, without spaces: for languages that don't separate words."""
    return [each for each in text.lower() if not each.isspace()]


def pairs(text: str) -> list[str]:
    """Return each two neighbouring characters."""
    return [first + second for first, second in pairwise(characters(text))]


SPLITTERS: dict[str, Callable[[str], list[str]]] = {"words": words, "characters": characters, "pairs": pairs}


class Tokenizer(NamedTuple):
    """Gives each token of a text its number in `vocabulary`; the first two are padding and unknown tokens.

    - `split`: what a token is, of SPLITTERS.
    - `length`: tokens of a text that count; shorter ones are padded.
    """

    split: str
    length: int
    vocabulary: tuple[str, ...]

    @classmethod
    def learn(cls, texts: Iterable[str], split: str, length: int, most: int) -> Self:
        """Return one that knows the `most` most frequent tokens of `texts`, if they occur twice."""
        counts = Counter(token for text in texts for token in SPLITTERS[split](text))
        frequent = sorted((token for token, count in counts.items() if count > 1), key=lambda one: (-counts[one], one))
        return cls(split, length, ("", "?", *frequent[:most]))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Return the one of a file. Raises DataError."""
        try:
            found = json.loads(file.read_text("utf-8"))
            split, length, vocabulary = found["split"], found["length"], found["vocabulary"]
            strings = isinstance(vocabulary, list) and all(isinstance(token, str) for token in vocabulary)
            if split in SPLITTERS and type(length) is int and 0 < length <= LONGEST and strings and len(vocabulary) > 1:
                return cls(split, length, tuple(vocabulary))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass
        raise DataError(file, "no tokenizer", f"the {FILE} that train_teacher.py writes into its --model_dir")

    def to_json(self) -> str:
        """Return the content of its file."""
        return json.dumps(self._asdict(), ensure_ascii=False)

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Return the numbers of the first `length` tokens of each text, padded with 0."""
        numbers = {token: number for number, token in enumerate(self.vocabulary)}
        tokens = np.full((len(texts), self.length), PADDING, np.int64)
        for row, text in zip(tokens, texts, strict=True):
            found = [numbers.get(token, UNKNOWN) for token in SPLITTERS[self.split](text)[: self.length]]
            row[: len(found) or 1] = found or UNKNOWN  # a text without tokens must not be all padding
        return tokens
