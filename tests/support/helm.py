"""The chart in deploy/chart, as Helm renders and installs it."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml
from support.paths import DEPLOY, ROOT

CHART = DEPLOY / "chart"


class HelmError(Exception):
    """What Helm complains about."""


def helm(*arguments: str) -> str:
    """Return what a command of Helm prints; skip where there is no Helm. Raises HelmError."""
    program = shutil.which("helm") or str(ROOT / ".helm" / "helm")
    if not shutil.which(program):
        pytest.skip("no helm here: `make helm` builds it where Go is to be had")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def values(**given: str) -> list[str]:
    """Return options that set values, as in redis__create="false"."""
    return [f"--set={name.replace('__', '.')}={value}" for name, value in given.items()]


def rendered(**given: str) -> list[dict[str, Any]]:
    """Return the chart's objects for the namespace `edl`."""
    return list(yaml.safe_load_all(helm("template", "edl", str(CHART), "--namespace=edl", *values(**given))))
