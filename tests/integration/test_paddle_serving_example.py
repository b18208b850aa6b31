"""The quick start of EDL: its page's commands with teachers of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.network.ports import free_ports
from support.paddle_serving_example import SAVE, STUDENT, TEACHER, accuracy_in, train, words


@pytest.mark.slow
def test_its_commands_run_as_they_stand(tmp_path: Path) -> None:
    """A teacher is saved and served, and a student gets far from chance by its answers alone."""
    pytest.importorskip("paddle")
    assert accuracy_in(train(words(SAVE), tmp_path)) > 60
    assert (tmp_path / "serving_conf/serving_client_conf.prototxt").exists()
    (port,) = free_ports(1)
    with subprocess.Popen(words(TEACHER, port), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as teacher:
        try:
            assert teacher.stdout is not None
            assert teacher.stdout.readline().startswith("teacher ready")
            assert accuracy_in(train(words(STUDENT, port), tmp_path)) > 60
        finally:
            teacher.kill()
