"""Names and selectors that the cluster takes."""

from __future__ import annotations

import re

from edl_runtime.backends.kubernetes import names
from edl_runtime.specs import NAME_LIMIT

LONGEST = "a" * NAME_LIMIT


def test_names_made_of_a_jobs_are_names_of_objects() -> None:
    """Also those of the longest, and with the number and the letters that its pods get."""
    for name in (names.secret_name(LONGEST), names.archive_name(LONGEST), f"{LONGEST}-9999-x8f2k"):
        assert len(name) <= 63
        assert re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)


def test_a_selector_finds_what_is_ours() -> None:
    """Of one job, or of all; logs that are kept of deleted jobs carry neither label."""
    assert names.selector("bert") == "app.kubernetes.io/managed-by=edl-airflow,edl-airflow/job=bert"
    assert names.selector() == "app.kubernetes.io/managed-by=edl-airflow,edl-airflow/job"
    assert names.LOG_OF not in names.selector()
