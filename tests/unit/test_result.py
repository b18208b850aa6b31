"""The result file that a training script leaves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.result import RESULT_LIMIT, write_result
from edl_runtime.settings import RuntimeSettings


@pytest.mark.parametrize(
    ("given", "arrives"),
    [
        ("out/model.npz", "{cwd}/out/model.npz"),
        ("/models/m", "/models/m"),
        ("s3://bucket/m", "s3://bucket/m"),
        ("", ""),
    ],
)
def test_a_checkpoint_is_found_from_any_folder(
    given: str, arrives: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the result stands elsewhere than the script did, so a relative path arrives as an absolute one."""
    monkeypatch.chdir(tmp_path)
    write_result(checkpoint=given, settings=RuntimeSettings(result_file="result.json"))
    left = msgspec.json.decode(Path("result.json").read_bytes())
    assert left == {"checkpoint": arrives.format(cwd=tmp_path), "metrics": {}}


def test_a_result_that_no_backend_can_carry_is_refused(tmp_path: Path) -> None:
    """The limit is named, and nothing is left behind."""
    settings = RuntimeSettings(result_file=str(tmp_path / "result.json"))
    with pytest.raises(SpecError, match=f"at most {RESULT_LIMIT}"):
        write_result(metrics={"losses": [0.5] * RESULT_LIMIT}, settings=settings)
    assert list(tmp_path.iterdir()) == []
