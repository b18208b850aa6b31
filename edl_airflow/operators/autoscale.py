"""Resizes all jobs and pools of a connection by traffic windows and a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from airflow.sdk import BaseOperatorLink

from edl_airflow import orphans
from edl_airflow.client import open_client
from edl_airflow.failures import failing_without_retry
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook
from edl_airflow.links import RescalingLink, push_links
from edl_airflow.operators.templates import (
    Arguments,
    TemplatedOperator,
    as_flag,
    as_number,
    check_connection,
    dag_folder,
    has_template,
)
from edl_airflow.results import RescalingResult, RescalingTarget
from edl_airflow.traffic_windows import Windows, load_windows, windows_field
from edl_runtime.autoscale.policy.interface import check_policy_name
from edl_runtime.autoscale.traffic.capacity import LEAD_S

if TYPE_CHECKING:
    from airflow.sdk import Context

    from edl_runtime.autoscale.history import RescaleOutcome
    from edl_runtime.autoscale.planner import RescalingRules
    from edl_runtime.autoscale.policy.interface import Policy


class EdlAutoscaleOperator(TemplatedOperator):
    """Resize all jobs and pools of a connection once, by traffic windows and a policy.

    Returns a `RescalingResult` with the targets and reasons. After the pass it ends orphans, see
    docs/how-to/production.md, unless it is a dry run. The log shows them as a table, and the task's link leads
    to a page about the last pass; a dry run has the table only.

    A pass takes seconds, so it runs in a worker and has no deferrable mode. Two at the same time run one after the
    other, and a pass completes what an interrupted one has left. The task fails, to be retried, if Redis or the cluster
    does not answer: nothing has changed before the pass has decided, later some jobs may have been resized.

    To have a person approve a pass, put Airflow's `ApprovalOperator` between a dry run and the pass;
    docs/how-to/rescaling.md shows how.

    :param windows: traffic windows, as a mapping, a Path of a YAML file (a relative one starts from the DAG's file), a
        text, or "variable:NAME" for an Airflow Variable, which is read when the task runs; None for all
        resources at all times (templated)
    :param max_load: the share of CPU and memory on the nodes that all pods together may reserve, 0 to 1; GPUs and other
        devices count whole (templated)
    :param lead_s: how many seconds before a window with less for training jobs shrink: the time between two passes, so
        that the room is free when the window begins
    :param policy: "package.module:function" of your own policy; None for the built-in one
    :param dry_run: show what would be done, and change nothing (templated)
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    """

    template_fields: Sequence[str] = ("windows", "max_load", "dry_run", "edl_conn_id")
    operator_extra_links: Sequence[BaseOperatorLink] = (RescalingLink(),)
    ui_color = "#fff2cc"
    arguments: ClassVar[Arguments] = {"dry_run": as_flag}

    def __init__(
        self,
        *,
        windows: Windows | None = None,
        max_load: float | str = 1.0,
        lead_s: float = LEAD_S,
        policy: str | None = None,
        dry_run: bool | str = False,
        edl_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.windows = None if windows is None else windows_field(windows, dag_folder(self))
        self.max_load = max_load
        self.lead_s = lead_s
        self.policy = policy
        self.dry_run = dry_run  # type: ignore[assignment,method-assign] # BaseOperator's is not called in Airflow 3
        self.edl_conn_id = check_connection(edl_conn_id)
        if policy is not None:
            check_policy_name(policy)
        self.check_arguments()
        self._rules(windows=None, max_load=1.0 if has_template(max_load) else max_load)

    def execute(self, context: Context) -> RescalingResult:
        """Make the pass."""
        with failing_without_retry():
            dry_run = self.argument("dry_run")
            if not dry_run:
                push_links(self, context)
            edl_connection = EdlHook(self.edl_conn_id).edl_connection()
            rules, policy = self._rules(self.windows, self.max_load), self._policy()

            async def rescale() -> RescaleOutcome:
                async with open_client(edl_connection) as client:
                    done = await client.rescale(rules, dry_run=dry_run, policy=policy)
                    if not dry_run and (cause := await orphans.look(edl_connection)):
                        self.log.warning("Whether jobs are left over is unknown: %s", cause)
                    return done

            result = _result(asyncio.run(rescale()), dry_run=dry_run)
        self._log_result(result)
        return result

    def _rules(self, windows: Windows | None, max_load: float | str) -> RescalingRules:
        """Return the rules of the pass. Raises SpecError."""
        from edl_runtime.autoscale.planner import RescalingRules

        return RescalingRules(
            windows=None if windows is None else load_windows(windows, folder=dag_folder(self)),
            max_load=as_number("max_load", max_load, "a share above 0, up to 1"),
            lead_s=as_number("lead_s", self.lead_s, "a number of seconds"),
        )

    def _policy(self) -> Policy:
        """Return the policy. Raises SpecError if it can't be imported."""
        if self.policy is None:
            from edl_runtime.autoscale.policy.decide import decide

            return decide
        from edl_runtime.autoscale.policy.interface import import_policy

        return import_policy(self.policy)

    def _log_result(self, result: RescalingResult) -> None:
        if result["dry_run"]:
            self.log.info("Dry run: nothing is changed")
        if result["why"]:
            self.log.info("%s", result["why"])
        for note in result["notes"]:
            self.log.warning("%s", note)
        for row in targets_rows(result["targets"]):
            self.log.info("%s", row)
        for name, why in result["refused"].items():
            self.log.warning("%s could not be resized: %s", name, why)


def targets_rows(targets: Sequence[RescalingTarget]) -> list[str]:
    """Return the lines of an aligned table: what each job or pool has, should have, and why."""
    if not targets:
        return ["There is no job or pool that can be resized"]
    cells = [("NAME", "NOW", "TARGET")]
    cells += [(one["name"], str(one["instances"]), str(one["target"])) for one in targets]
    name, now, target = (max(map(len, column)) for column in zip(*cells, strict=True))
    reasons = ["REASON", *(one["reason"] for one in targets)]
    return [
        f"{cell[0]:<{name}}  {cell[1]:>{now}}  {cell[2]:>{target}}  {reason}"
        for cell, reason in zip(cells, reasons, strict=True)
    ]


def _result(done: RescaleOutcome, *, dry_run: bool) -> RescalingResult:
    plan = done.plan
    return RescalingResult(
        at=plan.at,
        window=plan.window,
        until=plan.until,
        why=plan.why,
        capacity=plan.capacity,
        targets=msgspec.to_builtins(list(plan.targets)),
        refused=done.refused,
        notes=list(plan.notes),
        dry_run=dry_run,
    )
