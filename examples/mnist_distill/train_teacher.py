"""Trains the teacher on all labels and saves it as a Paddle inference model, for `edl teacher --model DIR`.

Does nothing when the same model exists.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import teaching


def main() -> None:
    """Train, unless the model is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="caches the digits")
    teaching.add_flags(parser, epochs=6)
    options = parser.parse_args()

    def prepare() -> teaching.Course:
        from digits import load_digits, shift
        from networks import Teacher

        return teaching.Course(Teacher(), load_digits(options.data_dir), shift)

    here = Path(__file__).resolve().parent
    teaching.train(prepare, options, code=[here / "digits.py", here / "train_teacher.py"], about_data="digits")


if __name__ == "__main__":
    main()
