"""How a job's report reads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edl_runtime.progress import Progress


def _report(**given: Any) -> Progress:
    return Progress(**{"step": 120, "updated_at": 1.0, **given})


LINES: list[tuple[dict[str, Any], str]] = [
    ({}, "step 120 · 0 samples/s"),
    (
        {
            "total_steps": 480,
            "loss": 0.31214,
            "samples_per_s": 5210.4,
            "teachers": 3,
            "answered": {"a:1": 900, "b:1": 10, "c:1": 90},
            "shares": {"a:1": 0.25, "b:1": 0.4, "c:1": 0.35},
            "cached": 9600,
            "waiting": 0.02,
            "queued": 4,
            "retries": 1,
            "hedges": 2,
            "quarantined": {"d:1": "lies"},
            "time_left_s": 70.2,
            "note": "seed 2",
        },
        (
            "step 120/480 · loss 0.3121 · 5,210 samples/s · 3 teachers (40/35/25 %) · 9,600 from the cache · waits 2 %"
            " · 4 queued · 1 retry · 2 hedges · 1 in quarantine · 1:10 left · seed 2"
        ),
    ),
    ({"teachers": 1, "shares": {"a:1": 1.0}}, "step 120 · 0 samples/s · 1 teacher"),
    ({"teachers": 2, "shares": {"a:1": 1.0}}, "step 120 · 0 samples/s · 2 teachers (100/0 %)"),
    ({"teachers": 0, "shares": {"a:1": 0.5, "b:1": 0.5}}, "step 120 · 0 samples/s"),
    (
        {"waiting": 1.0, "queued": 2, "shares": {"a:1": 1.0}},
        "step 120 · 0 samples/s · no teacher · waits 100 % · 2 queued",
    ),
    ({"teachers": 2, "answered": {"a:1": 9}}, "step 120 · 0 samples/s · 2 teachers"),
    (
        {"teachers": 1200, "shares": {f"a:{port}": 0.1 for port in range(10)}},
        "step 120 · 0 samples/s · 1,200 teachers (10/10/10/10/… %)",
    ),
    ({"retries": 1000, "hedges": 1}, "step 120 · 0 samples/s · 1,000 retries · 1 hedge"),
    ({"teachers": 1, "waiting": 0.004}, "step 120 · 0 samples/s · 1 teacher"),
    ({"time_left_s": 0.2}, "step 120 · 0 samples/s · 0:00 left"),
    ({"time_left_s": 5 * 3600 + 61}, "step 120 · 0 samples/s · 5:01:01 left"),
]


@pytest.mark.parametrize(("given", "line"), LINES)
def test_a_report_is_one_line_without_what_is_zero(given: dict[str, Any], line: str) -> None:
    """Counts have their words, and long lists an end."""
    assert _report(**given).line() == line


VERDICTS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    (
        {"limit": "teachers", "waiting": 0.38},
        "the teachers are the limit: the student waits 38 % of the time; more teachers would help",
    ),
    (
        {"limit": "teachers", "waiting": 0.38, "quarantined": {"d:1": "lies"}},
        (
            "the teachers are the limit: the student waits 38 % of the time; more teachers would help,"
            " and 1 is in quarantine"
        ),
    ),
    (
        {"limit": "source", "waiting": 0.5},
        (
            "the source is the limit: the student waits 50 % of the time, mostly for its own data;"
            " more teachers would not help"
        ),
    ),
    (
        {"limit": "answers", "waiting": 0.38, "busy": 0.5},
        (
            "the student waits 38 % of the time for answers, but teachers are idle 50 % of it;"
            " more teachers would not help"
        ),
    ),
    ({"limit": "student", "busy": 0.2}, "the student is the limit: teachers are idle 80 % of the time"),
    ({"limit": "balanced", "waiting": 0.05}, "balanced: the student waits 5 % of the time, and teachers are busy"),
    ({"limit": "no_answer"}, "no teacher answers: none is connected; the student waits"),
    (
        {"limit": "no_answer", "teachers": 2, "quarantined": {"d:1": "lies", "e:1": "lies"}},
        "no teacher answers: 2 are connected, and 2 are in quarantine; the student waits",
    ),
    ({"limit": "of a later version"}, ""),
]


@pytest.mark.parametrize(("given", "sentence"), VERDICTS)
def test_who_is_the_limit_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    """It says what that means for a person who could change something."""
    assert _report(**given).verdict() == sentence


def test_a_report_of_an_earlier_version_can_be_read() -> None:
    """Nothing is claimed of what it does not say."""
    earlier = b'{"step":3,"updated_at":1.0,"total_steps":9,"teachers":2,"answered":{"a:1":6},"loss":0.5,"note":""}'
    report = msgspec.json.decode(earlier, type=Progress)
    assert report.line() == "step 3/9 · loss 0.5000 · 0 samples/s · 2 teachers"
    assert (report.verdict(), report.quarantined) == ("", {})
