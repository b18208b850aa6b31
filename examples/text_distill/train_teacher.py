"""Trains a transformer on all labels and saves it as a Paddle inference model, for `edl teacher --model DIR`.

    python train_teacher.py --data_dir ../../.datasets/wordnet --model_dir teacher
    python train_teacher.py --data_dir ../../.datasets/chinese --tokens characters --length 64

The tokens that it knows are in the model's folder, in tokenizer.json. Does nothing when the same model exists.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / name) for name in ("mnist_distill", "vision_distill")]  # what it shares with those


def main() -> None:
    """Train, unless the model is up to date."""
    import teaching
    from flags import whole
    from text_flags import add_data_flags
    from tokens import LONGEST, SPLITTERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_flags(parser)
    teaching.add_flags(parser, epochs=3)
    parser.add_argument("--tokens", choices=sorted(SPLITTERS), default="words", help="what texts are split into")
    parser.add_argument("--length", type=whole(1, LONGEST), default=24, help="tokens of a text that count")
    parser.add_argument("--vocabulary", type=whole(1), default=15_000, help="most tokens to know, the frequent ones")
    parser.add_argument("--layers", type=whole(1, 24), default=1, help="of the transformer")
    options = parser.parse_args()

    def prepare() -> teaching.Course:
        from models import TransformerTeacher
        from text_flags import mask
        from texts import load_texts
        from tokens import Tokenizer

        texts = load_texts(options.data_dir, options.rows)
        tokenizer = Tokenizer.learn(texts.texts, options.tokens, options.length, options.vocabulary)
        teacher = TransformerTeacher(len(tokenizer.vocabulary), options.length, texts.classes, options.layers)
        samples, test_samples = tokenizer.encode(texts.texts), tokenizer.encode(texts.test_texts)
        data = (samples, texts.labels, test_samples, texts.test_labels)
        return teaching.Course(teacher, data, mask, tokenizer.to_json())

    code = [HERE / name for name in ("models.py", "texts.py", "tokens.py", "text_flags.py")]
    settings = (options.tokens, options.length, options.vocabulary, options.layers)
    teaching.train(prepare, options, code=code, about_data=(options.data_dir.resolve(), options.rows, settings))


if __name__ == "__main__":
    from vision_flags import run

    run(main)
