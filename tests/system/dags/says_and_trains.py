"""Prints a line that would harm a page that took it for HTML, and trains examples/elastic_train."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from edl_runtime import elastic

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "elastic_train" / "train.py"
HOSTILE = "<img src=x onerror=document.title='hacked'> \033[31mred\033[0m"

if __name__ == "__main__":
    assert elastic.init  # the script itself has to import it
    sys.stdout.write(f"{HOSTILE}\n")
    sys.stdout.flush()
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(sys.argv[0], run_name="__main__")
