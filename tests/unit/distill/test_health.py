"""What puts a teacher into quarantine, and what gets it out."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from edl_runtime.distill.health import FIRST_REST_S, JITTER, PROBATION, Health


@pytest.fixture
def health() -> Health:
    return Health("a:1")


def probed(health: Health) -> None:
    """Have it answer as it should once it has rested."""
    health.answered(asked_at=time.monotonic() + 60)


def test_only_a_probe_ends_a_quarantine(health: Health) -> None:
    """Not the right answer to what another connection had asked before."""
    health.misbehaved("garbage")
    health.answered(asked_at=time.monotonic())
    assert (health.reason, health.out.is_set()) == ("garbage", False)
    probed(health)
    assert (health.reason, health.out.is_set()) == ("", True)


def test_one_that_misbehaves_again_and_again_rests_ever_longer(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers in between don't help it, unless it has behaved for a time."""
    now = [1000.0]
    monkeypatch.setattr("edl_runtime.distill.health.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("edl_runtime.distill.health.JITTER", 1.0)
    rests = []
    for good_s in (0.0, 0.0, 0.0, PROBATION * 16 * FIRST_REST_S):
        health.misbehaved("garbage")
        rests.append(health.due_in_s(now[0]))
        probed(health)
        now[0] += good_s
    health.misbehaved("garbage")
    assert [*rests, health.due_in_s(now[0])] == pytest.approx([FIRST_REST_S * times for times in (1, 2, 4, 8, 1)])


def test_nobody_waits_for_one_that_is_not_in_use(health: Health) -> None:
    """Whatever is found out about it before or after."""
    health.misbehaved("garbage")
    health.retire()
    assert health.out.is_set()
    late = Health("b:2")
    late.retire()
    late.misbehaved("garbage")
    assert late.out.is_set()


def test_no_two_rest_alike() -> None:
    """Else they would be probed together again and again, and each be asked what it was asked before."""
    ends = set()
    for _ in range(20):
        health = Health("a:1")
        health.misbehaved("garbage")
        ends.add(round(health.due_in_s(time.monotonic()) / FIRST_REST_S, 2))
    assert len(ends) > 2
    assert max(ends) <= JITTER
