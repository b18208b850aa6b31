"""A training script that imports all from another module: this file does not show that it is elastic."""

from __future__ import annotations

import sys
from pathlib import Path

import elastic_script

if __name__ == "__main__":
    elastic_script.main(Path(sys.argv[1]))
