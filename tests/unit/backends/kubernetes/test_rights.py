"""Which rights a job needs, and which an account lacks."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from support.cluster.manifests import manifests
from support.cluster.recorder import only

from edl_runtime.backends.kubernetes.rights import missing_rights, needed_rights
from edl_runtime.specs import JobKind


def rule(groups: list[str], resources: list[str], verbs: list[str], **more: Any) -> dict[str, Any]:
    return {"apiGroups": groups, "resources": resources, "verbs": verbs, **more}


@pytest.mark.parametrize("kind", get_args(JobKind))
def test_the_role_grants_all_that_a_job_needs(kind: JobKind) -> None:
    """So none of its users is refused."""
    role = only("Role", manifests("role.yaml", "edl"))
    assert missing_rights(needed_rights(kind), role["rules"]) == []
    assert missing_rights(needed_rights(kind), []) == list(needed_rights(kind))


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
