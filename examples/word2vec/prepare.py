"""Makes what train.py reads: the dictionary, and shards of n-grams for training and for the test.

    python prepare.py --data_dir ../../.datasets/wordnet --out grams

Reads WordNet's glosses or a folder of CLASS.txt, as ../text_distill does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from corpus import build_dict, load_sentences, n_grams
from embeddings import save_words
from flags import whole
from pictures import DataError

from edl_runtime.errors import EX_DATAERR, EdlError
from edl_runtime.shards.convert import convert

TEST_SENTENCES = 2_000
"""At most, of those that are held out: the test after each pass should be short."""


def main() -> None:
    """Write the dictionary and both sets of shards."""
    options = _options()
    try:
        train, test = load_sentences(options.data_dir, options.rows)
        word_dict = build_dict(train)
        save_words(options.out, list(word_dict))
        for name, sentences in (("train", train), ("test", test[:TEST_SENTENCES])):
            made = convert(
                lambda sentences=sentences: n_grams(sentences, word_dict),
                str(options.out / name),
                records_per_shard=options.records_per_shard,
                overwrite=True,
            )
            print(f"{name}: {sum(made.shards.values()):,} n-grams in {len(made.shards)} shards", flush=True)
    except (DataError, EdlError) as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(EX_DATAERR)
    print(f"{len(word_dict):,} words")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="WordNet's data.* files, or CLASS.txt")
    parser.add_argument("--rows", type=whole(10), help="texts for training; by default all")
    parser.add_argument("--out", type=Path, default=Path("grams"), help="a folder")
    parser.add_argument("--records-per-shard", type=whole(1), default=50_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
