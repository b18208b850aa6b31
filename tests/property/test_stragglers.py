"""Stragglers under all kinds of noise: none where all are equally slow, and never two changes within the time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.elastic.agent.stragglers import StragglerWatch, slowdown

FACTOR, FOR_S = 1.5, 300.0

seconds = st.floats(1e-4, 100.0)
ratios = st.floats(0.1, 10.0)


@given(seconds, st.lists(st.floats(1.0, 1.2), min_size=2, max_size=16))
def test_nobody_is_slow_where_all_are_about_equal(usual_s: float, noise: list[float]) -> None:
    """However slow they are together."""
    own_s, *peers_s = (usual_s * each for each in noise)
    assert slowdown(own_s, peers_s) < FACTOR


@given(seconds, st.lists(seconds, min_size=1, max_size=16), st.floats(1.0, 5.0))
def test_who_computes_longer_is_not_less_slow(own_s: float, peers_s: list[float], by: float) -> None:
    assert slowdown(own_s * by, peers_s) >= slowdown(own_s, peers_s) or own_s < min(peers_s)


@given(st.lists(st.tuples(st.floats(0.1, 200.0), ratios), max_size=60))
def test_a_watch_changes_at_most_once_in_its_time(observed: list[tuple[float, float]]) -> None:
    """To what has held ever since it began; so it never flaps, whatever a busy machine does."""
    watch, now, before = StragglerWatch(FACTOR, FOR_S), 0.0, 0.0
    history: list[tuple[float, bool]] = []
    changed_at = []
    for pause_s, ratio in observed:
        now += pause_s
        history.append((now, ratio >= FACTOR))
        after = watch.observe(ratio, now)
        if bool(after) != bool(before):
            changed_at.append(now)
            recent = [slow for at, slow in history if at >= now - FOR_S]
            assert set(recent) == {bool(after)}
        assert not after or after >= 0
        before = after
    assert all(second - first >= FOR_S for first, second in pairwise(changed_at))
