"""Paths of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
DAGS = ROOT / "dags"
DEPLOY = ROOT / "deploy"
EXAMPLES = ROOT / "examples"
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
TRAINING_SCRIPTS = SUPPORT / "elastic" / "scripts"
