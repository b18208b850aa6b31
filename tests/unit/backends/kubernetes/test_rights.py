"""Which rights a job needs, and which an account lacks."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from support.cluster.manifests import manifests
from support.cluster.recorder import CREATIONS, OPTIONAL, only, verbs_of

from edl_runtime.backends.kubernetes.rights import missing_rights, needed_rights
from edl_runtime.specs import JobKind


def rule(groups: list[str], resources: list[str], verbs: list[str], **more: Any) -> dict[str, Any]:
    return {"apiGroups": groups, "resources": resources, "verbs": verbs, **more}


def test_the_rights_that_are_rehearsed_are_those_of_the_role() -> None:
    """A test on a cluster compares the role with what is asked there. So a submit fails, and nothing later."""
    granted = verbs_of(only("Role", manifests("role.yaml", "edl")))
    rehearsed = {right for kind in get_args(JobKind) for right in needed_rights(kind)}
    assert sorted(rehearsed | CREATIONS | OPTIONAL) == sorted(granted)
    assert not rehearsed & (CREATIONS | OPTIONAL)


@pytest.mark.parametrize("kind", get_args(JobKind))
def test_where_no_logs_are_kept_no_right_to_config_maps_is_needed(kind: JobKind) -> None:
    there = set(needed_rights(kind)) - set(needed_rights(kind, keeps_log=False))
    assert {resource for _, resource, _ in there} == {"configmaps"}


@pytest.mark.parametrize("kind", get_args(JobKind))
def test_who_has_no_rights_lacks_all(kind: JobKind) -> None:
    assert missing_rights(needed_rights(kind), []) == list(needed_rights(kind))


@pytest.mark.parametrize("file", ["controller.yaml", "controller-cluster.yaml"])
def test_a_controller_may_do_what_its_jobs_need(file: str) -> None:
    """It starts trainers alone."""
    (rules,) = [
        one["rules"] for one in manifests(file, "edl") if one["metadata"]["name"] == "edl-controller" and "rules" in one
    ]
    assert missing_rights(needed_rights("trainer"), rules) == []


@pytest.mark.parametrize(
    ("rules", "is_missing"),
    [
        ([rule(["batch"], ["jobs"], ["patch"])], False),
        ([rule(["*"], ["*"], ["*"])], False),
        ([rule(["apps", "batch"], ["deployments", "jobs"], ["get", "patch"])], False),
        ([rule([""], ["jobs"], ["patch"])], True),
        ([rule(["batch"], ["jobs/status"], ["patch"])], True),
        ([rule(["batch"], ["jobs"], ["get"]), rule(["batch"], ["cronjobs"], ["patch"])], True),
        ([rule(["batch"], ["jobs"], ["patch"], resourceNames=["one"])], True),
    ],
    ids=["granted", "all", "among others", "another group", "a part", "in no one rule", "for one name"],
)
def test_a_right_is_granted_by_one_rule_for_any_name(rules: list[dict[str, Any]], *, is_missing: bool) -> None:
    """As the API server decides."""
    needed = ("batch", "jobs", "patch")
    assert missing_rights([needed], rules) == ([needed] if is_missing else [])
