"""A pool in two places, as the example runs it: real teachers of two backends, one registry, one student."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import EXAMPLES

from edl_runtime.settings import RuntimeSettings

SCRIPT = EXAMPLES / "burst_pool" / "two_places.py"


@pytest.mark.slow
def test_a_student_reads_from_both_places_while_there_are_two(settings: RuntimeSettings, tmp_path: Path) -> None:
    """The script checks each answer, and fails if one is lost or wrong."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "places.svg"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--phase-s", "3", "--picture", str(picture)],
        env={**os.environ, **settings.to_env(), "EDL_TEACHER_WAIT_S": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = re.findall(r"(?m)^(.+?) +first place +(\d+), second +(\d+) answers$", ran.stdout)
    assert [phase for phase, *_ in found] == ["home", "both", "home again"]
    (home, none), (_, burst), (again, _) = ((int(first), int(second)) for _, first, second in found)
    assert none == 0
    assert min(home, burst, again) > 0
    assert picture.stat().st_size > 0
