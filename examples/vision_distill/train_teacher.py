"""Trains a residual teacher on all labels and saves it as a Paddle inference model, for `edl teacher --model DIR`.

    python train_teacher.py --data_dir ../../.datasets/fashion --model_dir teacher

Does nothing when the same model exists.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "mnist_distill"))  # what it shares with that example


def main() -> None:
    """Train, unless the model is up to date."""
    import teaching
    from vision_flags import add_data_flags

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_flags(parser)
    teaching.add_flags(parser, epochs=8)
    options = parser.parse_args()

    def prepare() -> teaching.Course:
        from models import ResidualTeacher
        from pictures import augment, load_pictures

        pictures = load_pictures(options.data_dir, options.image_shape, options.rows)
        return teaching.Course(ResidualTeacher(options.image_shape[0], pictures.classes), pictures, augment)

    code = [HERE / name for name in ("models.py", "pictures.py")]
    about_data = (options.data_dir.resolve(), options.image_shape, options.rows)
    teaching.train(prepare, options, code=code, about_data=about_data)


if __name__ == "__main__":
    from vision_flags import run

    run(main)
