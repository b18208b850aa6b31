"""What the teacher's and the student's script have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from flags import whole
from tokens import PADDING, UNKNOWN, Tokens

MASKED = 0.15


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which texts to use."""
    parser.add_argument(
        "--data_dir", type=Path, default=Path("data"), help="WordNet's data.* files, or CLASS.txt with a text a line"
    )
    parser.add_argument("--rows", type=whole(10), help="texts for training; by default all")


def mask(tokens: Tokens, rng: np.random.Generator) -> Tokens:
    """Return the tokens, 15 % of them unknown, so that each epoch has new texts."""
    return np.where((tokens != PADDING) & (rng.random(tokens.shape) < MASKED), UNKNOWN, tokens)
