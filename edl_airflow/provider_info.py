"""Metadata of this provider for Airflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_FOR_THE_REGISTRY = ("state", "lifecycle", "source-date-epoch", "versions", "plugins")
"""What Airflow itself does not ask for. It would load the plugin a second time, beside that of the entry point."""


def get_provider_info() -> dict[str, Any]:
    """Return what provider.yaml says, as Airflow's provider_info.schema.json defines it."""
    info: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("provider.yaml").read_bytes())
    return {key: value for key, value in info.items() if key not in _FOR_THE_REGISTRY}
