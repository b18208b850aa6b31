"""What checkpoints cost is measured. How fast anything is, is for people to judge."""

from __future__ import annotations

import pytest
from integration.test_benchmarks import result_of


@pytest.mark.slow
def test_saving_in_the_background_is_measured_beside_other_ways() -> None:
    """With steps that sleep and with steps that compute."""
    found = result_of("checkpoint.py", "--quick")
    for kind in ("asleep", "computing"):
        assert set(found[kind]) == {"background", "at once", "safetensors", "paddle.save"}
        assert all(0 < result["blocked_percent"] < 100 for result in found[kind].values())
        assert found[kind]["background"]["written_in_s"] > 0
