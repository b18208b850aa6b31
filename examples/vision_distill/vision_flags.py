"""What the teacher's and the student's script have in common: flags, and how they end for data that can't be used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from flags import whole
from pictures import DataError, Shape

from edl_runtime.errors import SpecError

EX_DATAERR = 65
"""With this exit status, a job is not tried again."""


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which pictures to use."""
    parser.add_argument(
        "--data_dir", type=Path, default=Path("data"), help="IDX files, or class folders of pictures (ImageFolder)"
    )
    parser.add_argument("--image_shape", type=image_shape, default=(1, 28, 28), help="channels,height,width")
    parser.add_argument("--rows", type=whole(10), help="pictures for training; by default all")


def image_shape(text: str) -> Shape:
    """Parse channels,height,width, as EDL's scripts take them."""
    words = text.split(",")
    if len(words) == 3 and all(word.strip().isdecimal() for word in words):
        channels, height, width = map(int, words)
        if channels in {1, 3} and min(height, width) >= 8 and max(height, width) <= 1024:
            return channels, height, width
    raise argparse.ArgumentTypeError(f"got {text!r}, allowed is channels,height,width: 1 or 3, and 8 to 1024 each")


def run(main: Callable[[], None]) -> None:
    """Run a script; for data and flags that can't be used, print why and exit with EX_DATAERR."""
    try:
        main()
    except (DataError, SpecError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(EX_DATAERR)
