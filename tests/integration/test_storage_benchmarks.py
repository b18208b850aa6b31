"""The benchmarks of the ledger and of checkpoints run. How fast anything is, is for people to judge."""

from __future__ import annotations

import pytest
from integration.test_benchmarks import result_of

pytestmark = pytest.mark.deep


def test_leases_and_acknowledgements_are_counted() -> None:
    """One at a time and in batches; a checkpoint of 100,000 shards has a state of a few bytes."""
    found = result_of("ledger.py", "--quick")
    assert all(
        found["shards_per_s"][f"{workers} workers, batches of {size}"] > 0 for workers in (1, 4) for size in (1, 128)
    )
    assert found["state_bytes"] < 2000


def test_saving_in_the_background_is_measured_beside_other_ways() -> None:
    """With steps that sleep and with steps that compute."""
    found = result_of("checkpoint.py", "--quick")
    for kind in ("asleep", "computing"):
        assert set(found[kind]) == {"background", "at once", "safetensors", "paddle.save"}
        assert all(0 < result["blocked_percent"] < 100 for result in found[kind].values())
        assert found[kind]["background"]["written_in_s"] > 0
