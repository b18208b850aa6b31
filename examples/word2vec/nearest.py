"""Lists the words whose embeddings are nearest to those of given words.

python nearest.py --model_dir model water plant
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from embeddings import EmbeddingError, load_embeddings, nearest


def main() -> None:
    """Print a line for each word."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model_dir", type=Path, default=Path("model"), help="of train.py")
    parser.add_argument("words", nargs="+")
    options = parser.parse_args()
    try:
        words, table = load_embeddings(options.model_dir)
        for word in options.words:
            print(f"{word}: " + ", ".join(f"{found} {cosine:.2f}" for found, cosine in nearest(words, table, word)))
    except EmbeddingError as error:
        sys.exit(f"nearest.py: {error}")


if __name__ == "__main__":
    main()
