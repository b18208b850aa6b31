"""What holds for any quantity, any pod and any number of instances."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.capacity import amount
from edl_runtime.backends.kubernetes.job_status import completions_for, failed_indexes, job_status
from edl_runtime.backends.kubernetes.pod_template import _escape
from edl_runtime.errors import SpecError
from edl_runtime.pods import MAX_QUANTITY, Pod, Volume
from edl_runtime.specs import Bounds, JobSpec

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,5}[a-z0-9])?", fullmatch=True)
TEXTS = st.text(max_size=8)
QUANTITIES = st.integers(0, 10**14) | st.sampled_from(["500m", "8Gi", "1e3", ".5", "2."])
ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("0123456789.eE+-numkMGTPEi ", max_size=6) | TEXTS
)
JSON = st.recursive(
    st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
PODS = st.builds(
    Pod,
    image=st.sampled_from(["", "train:1"]),
    resources=st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES),
    node_selector=st.dictionaries(NAMES, NAMES, max_size=2),
    tolerations=st.lists(st.dictionaries(TEXTS, JSON, max_size=2), max_size=2),
    affinity=st.dictionaries(TEXTS, JSON, max_size=2),
    priority_class=st.sampled_from(["", "high"]),
    service_account=st.sampled_from(["", "trainer"]),
    volumes=st.lists(
        st.builds(Volume, path=st.sampled_from(["/a", "/b", "/tmp"]), claim=NAMES, read_only=st.booleans())
        | st.just(Volume(path="/x", source={"emptyDir": {}})),
        max_size=2,
        unique_by=lambda v: v.path,
    ),
    secret_env=st.dictionaries(NAMES.map(lambda name: name.replace("-", "_")), NAMES.map(lambda name: f"{name}/key")),
    env_from_secrets=st.lists(NAMES, max_size=2, unique=True),
    pull_secrets=st.lists(NAMES, max_size=2, unique=True),
    labels=st.dictionaries(NAMES, NAMES, max_size=2),
    annotations=st.dictionaries(NAMES, TEXTS, max_size=2),
    disruptions=st.integers(0, 3),
    template=st.fixed_dictionaries({}, optional={"spec": st.dictionaries(st.just("x"), JSON)}),
)


@pytest.mark.slow
@given(ANYTHING)
def test_what_is_taken_as_a_quantity_is_one(given_: Any) -> None:
    """An amount, finite and not negative; whatever else is given is refused and nothing worse."""
    try:
        (quantity,) = Pod(resources={"memory": given_}).amounts().values()
    except SpecError:
        return
    assert 0 <= amount(quantity) <= MAX_QUANTITY


@given(PODS)
def test_any_pod_survives_json(pod: Pod) -> None:
    """With the same digest of its job."""
    spec = JobSpec(name="job", kind="pool", command=("true",), bounds=Bounds(1, 1), instances=1, pod=pod)
    again = msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec)
    assert again == spec
    assert again.digest == spec.digest


@given(PODS, PODS)
def test_a_pod_over_defaults_keeps_what_it_says(pod: Pod, defaults: Pod) -> None:
    """And over the same defaults again it is the same."""
    both = pod.over(defaults)
    assert both.over(defaults) == both
    assert pod.over(Pod()) == Pod().over(pod) == pod
    assert both.image == (pod.image or defaults.image)
    for field in ("resources", "node_selector", "secret_env", "labels", "annotations", "affinity"):
        assert getattr(both, field) == {**getattr(defaults, field), **getattr(pod, field)}
    assert set(both.pull_secrets) == {*pod.pull_secrets, *defaults.pull_secrets}
    assert {volume.path for volume in both.volumes} == {volume.path for volume in (*pod.volumes, *defaults.volumes)}
    assert all(volume in both.volumes for volume in pod.volumes)


@given(TEXTS | st.text("$()A", max_size=8))
def test_kubernetes_makes_of_a_word_what_it_was(word: str) -> None:
    """Its own rule, undone: "$$" is "$", and "$(NAME)" is replaced."""
    expanded, rest = "", _escape(word)
    while rest:
        assert not rest.startswith("$(")
        taken = 2 if rest.startswith("$$") else 1
        expanded, rest = expanded + rest[0], rest[taken:]
    assert expanded == word


def ranges(indexes: set[int]) -> str:
    """Write indexes as a Job does."""
    parts = []
    for first in sorted(index for index in indexes if index - 1 not in indexes):
        last = first
        while last + 1 in indexes:
            last += 1
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(parts)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), min_size=1, max_size=8), st.integers(1, 6))
def test_a_job_that_is_resized_and_loses_instances_has_those_it_should(
    steps: list[tuple[bool, int]], instances: int
) -> None:
    """After growing as many as wanted, those of new numbers among them; shrinking takes the highest that live.

    A Job that is suspended, by 0, keeps its size, and gets as many as are wanted when it goes on.
    """
    completions = wanted = instances
    failed: set[int] = set()
    for loses, number in steps:
        if loses:
            failed.add(number % completions)
            continue
        if not number:
            wanted = 0
            continue
        job = {
            "kind": "Job",
            "metadata": {"annotations": {names.WANTED: str(wanted)}},
            "spec": {"completions": completions},
            "status": {"failedIndexes": ranges(failed)},
        }
        assert failed_indexes(job) == sorted(failed)
        needed = completions_for(job, number)
        alive = set(range(needed)) - failed
        assert needed >= 1
        if number > wanted:
            assert len(alive) == number
            assert needed >= completions or not wanted
        elif number == wanted:
            assert needed == completions
        else:
            living = completions - len(failed)
            assert len(alive) == max(1, min(number, living))
            assert needed <= completions or not living
        completions, wanted = needed, number
        failed = {index for index in failed if index < completions}


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=4), st.integers(0, 5), st.booleans())
def test_a_job_fails_by_what_the_cluster_does_when_that_is_too_often_for_an_instance(
    hits: list[tuple[int, bool]],
    most: int,
    elastic: bool,  # noqa: FBT001
) -> None:
    """And never before: `hits` are how often each was ended, and whether it is being ended once more."""
    annotations = {names.MOST_DISRUPTIONS: str(most), names.ELASTIC: str(elastic).lower()}
    job = {
        "kind": "Job",
        "metadata": {"labels": {names.JOB: "job"}, "annotations": annotations},
        "spec": {"completions": len(hits)},
    }
    pods = [
        {
            "metadata": {"name": f"p{index}", "annotations": {names.INDEX: str(index), names.DISRUPTIONS: str(before)}},
            "status": {"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True"}] * going},
        }
        for index, (before, going) in enumerate(hits)
    ]
    counts = [before + going for before, going in hits]
    status = job_status(job, pods, 0.0)
    assert [one.disruptions for one in status.instances] == counts
    assert (status.phase == "failed") == status.is_disrupted == (max(counts) > most)
    assert not status.failed_permanently
    assert bool(status.reason) == (status.is_disrupted or any(going for _, going in hits))
