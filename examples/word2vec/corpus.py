"""Sentences as n-grams of word ids, as in Paddle's word2vec tutorial."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# The texts and words of the text example, and what that uses.
sys.path.extend(
    str(Path(__file__).resolve().parent.parent / name) for name in ("mnist_distill", "vision_distill", "text_distill")
)

from texts import load_texts
from tokens import words

N = 5
"""Words of an n-gram: the last one is to be predicted from the others."""

CUTOFF = 50
"""Words that occur so often, or less, are unknown."""

MOST_WORDS = 2073
"""With the unknown one: as many as the tutorial's corpus has, so that errors compare."""

START, END, UNKNOWN = "<s>", "<e>", "<unk>"

WordDict = dict[str, int]


def load_sentences(data_dir: Path, rows: int | None) -> tuple[list[list[str]], list[list[str]]]:
    """Return the words of the texts for training, `rows` of them, and of those held out. Raises DataError."""
    found = load_texts(data_dir, rows)
    return [words(text) for text in found.texts], [words(text) for text in found.test_texts]


def build_dict(sentences: Iterable[Sequence[str]], cutoff: int = CUTOFF, most: int = MOST_WORDS) -> WordDict:
    """Return the id of each frequent word, the most frequent first, and last that of unknown ones; at most `most`."""
    counts = Counter(word for sentence in sentences for word in (START, *sentence, END))
    frequent = sorted((word for word in counts if counts[word] > cutoff), key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate([*frequent[: most - 1], UNKNOWN])}


def n_grams(sentences: Iterable[Sequence[str]], word_dict: WordDict) -> Iterator[tuple[int, ...]]:
    """Yield each N words that follow each other in a sentence, its start and end included."""
    unknown = word_dict[UNKNOWN]
    for sentence in sentences:
        ids = [word_dict.get(word, unknown) for word in (START, *sentence, END)]
        for end in range(N, len(ids) + 1):
            yield tuple(ids[end - N : end])
