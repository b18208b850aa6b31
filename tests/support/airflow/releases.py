"""Releases of Airflow, and the pins with which each is installed."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

from support.packages import UV


class Release(NamedTuple):
    version: str
    until: str
    """The day after its release, which ends what its constraints could pin."""

    def constraints(self, folder: Path) -> Path:
        """Return Airflow's constraints file, or where that can't be reached what would be in one that is made now.

        Airflow makes its file by `uv pip install --resolution highest` on the day of the release; so do we.
        """
        python = "{}.{}".format(*sys.version_info[:2])
        file = folder / f"constraints-{self.version}.txt"
        url = f"https://raw.githubusercontent.com/apache/airflow/constraints-{self.version}/constraints-{python}.txt"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                file.write_bytes(answer.read())
        except URLError:
            wanted = folder / f"airflow-{self.version}.in"
            wanted.write_text(f"apache-airflow=={self.version}\napache-airflow-providers-cncf-kubernetes\n")
            options = ["--quiet", "--python-version", python, "--exclude-newer", self.until, "--output-file", file]
            subprocess.run([UV, "pip", "compile", *options, wanted], check=True)
        return file


OLDEST = Release("3.3.0", "2026-07-07")
NEWEST = Release("3.3.2", "2026-09-18")
