"""The benchmark of the ledger runs. How fast anything is, is for people to judge."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import BENCHMARKS

SCRIPT = BENCHMARKS / "ledger.py"


@pytest.mark.slow
def test_leases_and_acknowledgements_are_counted() -> None:
    """Batches are faster than one at a time, and a checkpoint of 100,000 shards has a state of a few bytes."""
    command = [sys.executable, str(SCRIPT), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rates = found["shards_per_s"]
    assert rates["1 workers, batches of 128"] > 3 * rates["1 workers, batches of 1"] > 0
    assert rates["4 workers, batches of 128"] > 3 * rates["4 workers, batches of 1"] > 0
    assert found["state_bytes"] < 2000
