"""Gives all jobs and pools of a connection the instances that traffic and the policy say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from airflow.sdk import BaseOperatorLink
from airflow.sdk.exceptions import TaskAwaitingInput

from edl_airflow.client import EdlClient, open_client
from edl_airflow.failures import failing_without_retry
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook
from edl_airflow.links import RescalingLink, push_links
from edl_airflow.operators.approval import APPROVE, REJECT, ask_to_shrink, is_asked_already, read_answer
from edl_airflow.operators.templates import (
    TemplatedOperator,
    as_flag,
    as_number,
    check_connection,
    check_seconds,
    dag_folder,
    has_template,
)
from edl_airflow.results import RescalingResult, RescalingTarget
from edl_airflow.traffic_windows import Windows, load_windows, windows_field
from edl_runtime.autoscale.policy.wrappers import check_policy_name
from edl_runtime.autoscale.traffic.capacity import LEAD_S
from edl_runtime.errors import SpecError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from edl_runtime.autoscale.planner import JobTarget, RescalingRules
    from edl_runtime.autoscale.policy.wrappers import Policy, ShrinkApproval
    from edl_runtime.autoscale.rescale import RescaleOutcome

PassResult: TypeAlias = tuple[RescalingResult, list[RescalingTarget]]
"""What came of a pass, and the shrinks that a person is to be asked about."""


class EdlAutoscaleOperator(TemplatedOperator):
    """Make one pass of the policy over all jobs and pools of a connection: look, decide, resize.

    Returns a `RescalingResult`: the targets and why. The log has them as a table of NAME, NOW, TARGET and REASON, and
    the task's link leads to a page with the last pass; a dry run is none, and has the table alone.

    A pass takes seconds, so the task makes it in a worker, and has no deferrable mode. Two at once come one after the
    other; one that is ended half-way is completed by the next. The task fails and is tried again if Redis or the
    cluster can't be asked: before it has decided nothing is changed, and after that some jobs may have been resized,
    and the next try completes it. Mistakes in what is given fail it at once.

    With `approve_shrinks` a person is asked, by the DAG's *Required Actions*, before jobs or pools lose instances that
    run; the task waits in the state `awaiting_input` and takes up no worker. What can grow without that grows at once.
    When the answer is there the pass is made anew, by what is then, and only those shrink that the person was asked
    about, and no further than the question said. The answer holds for `approval_timeout_s`. Until then runs do as it
    says: who was refused keeps what it has, and nobody is asked about it again; who should shrink below what was
    approved shrinks so far, and a run asks about the rest. A task that is tried again, or cleared, shows its first
    question again, and the answer is about the jobs and numbers there. Airflow may lose an answer that is given within
    some seconds of the question; with a retry the task asks again.

    While a run waits for an answer, later ones make their pass without what has to be approved, whichever jobs the
    question is about: the log names what nobody is asked about yet. Two runs at the same moment may both ask; of two
    persons' answers about a job the later counts, and a person's always before that of nobody.

    :param windows: traffic windows, as a mapping, a Path of a YAML file (a relative one starts from the DAG's file), a
        text, or "variable:NAME" for an Airflow Variable, which is read when the task runs; None for all there is,
        always (templated)
    :param max_load: the share of each resource that everything on the nodes together may reserve, 0 to 1 (templated)
    :param lead_s: seconds before a window begins that leaves less to training from which jobs shrink: so long as the
        time between two passes, if nobody is to wait for room when it begins
    :param policy: "package.module:function" of a policy of one's own; None for ours
    :param dry_run: show what would be done, and change nothing (templated)
    :param approve_shrinks: ask a person before jobs or pools shrink (templated)
    :param approval_timeout_s: seconds to wait for the answer, and for which it holds
    :param unanswered: what becomes of what should shrink when nobody answers: "keep" it as it is, or "shrink"
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    """

    template_fields: Sequence[str] = ("windows", "max_load", "dry_run", "approve_shrinks", "edl_conn_id")
    operator_extra_links: Sequence[BaseOperatorLink] = (RescalingLink(),)
    ui_color = "#fff2cc"

    def __init__(
        self,
        *,
        windows: Windows | None = None,
        max_load: float | str = 1.0,
        lead_s: float = LEAD_S,
        policy: str | None = None,
        dry_run: bool | str = False,
        approve_shrinks: bool | str = False,
        approval_timeout_s: float = 3600,
        unanswered: Literal["keep", "shrink"] = "keep",
        edl_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.windows = None if windows is None else windows_field(windows, dag_folder(self))
        self.max_load = max_load
        self.lead_s = lead_s
        self.policy = policy
        self.dry_run = dry_run  # type: ignore[assignment,method-assign] # BaseOperator's is not called in Airflow 3
        self.approve_shrinks = approve_shrinks
        self.approval_timeout_s = approval_timeout_s
        self.unanswered = unanswered
        self.edl_conn_id = check_connection(edl_conn_id)
        if policy is not None:
            check_policy_name(policy)
        if unanswered not in ("keep", "shrink"):
            raise SpecError("unanswered", unanswered, "'keep' or 'shrink'")
        for field, flag in (("dry_run", dry_run), ("approve_shrinks", approve_shrinks)):
            if not has_template(flag):
                as_flag(field, flag)
        check_seconds("approval_timeout_s", approval_timeout_s)
        self._rules(windows=None, max_load=1.0 if has_template(max_load) else max_load)

    def execute(self, context: Context) -> RescalingResult:
        """Make the pass, and ask for what is to shrink if somebody has to approve."""
        with failing_without_retry():
            dry_run = as_flag("dry_run", self.dry_run)
            asks = as_flag("approve_shrinks", self.approve_shrinks) and not dry_run
            if not dry_run:
                push_links(self, context)
            result, unasked = self._make(self._approved_pass if asks else partial(self._pass, dry_run=dry_run))
        if not unasked:
            return result
        if is_asked_already(context):
            names = _listed(_by_name(unasked))
            self.log.info("Another run waits for an answer; until then nobody is asked whether these shrink: %s", names)
            return result
        default = APPROVE if self.unanswered == "shrink" else REJECT
        shown = ask_to_shrink(context, unasked, default=default)
        if shown != _by_name(unasked):
            self.log.warning(
                "Airflow still asks what the task's first try has asked, and only that: %s", _listed(shown)
            )
        waits = timedelta(seconds=self.approval_timeout_s)
        raise TaskAwaitingInput(method_name=self.go_on.__name__, kwargs={"targets": shown}, timeout=waits)

    def go_on(self, context: Context, targets: dict[str, int], event: dict[str, Any]) -> RescalingResult:  # noqa: ARG002
        """Make the pass anew when the answer is there, on an operator that has never executed."""
        from edl_runtime.autoscale.policy.wrappers import ShrinkApproval

        approved, by = read_answer(event)
        who = by or f"Nobody has answered within {self.approval_timeout_s:g} s, which"
        verb = "approves" if approved else "refuses"
        self.log.info("%s %s that these shrink: %s", who, verb, _listed(targets))
        said = targets if by or approved else {}
        answers = {name: ShrinkApproval(approved=approved, target=target) for name, target in said.items()}
        with failing_without_retry():
            result, unasked = self._make(partial(self._approved_pass, answers=answers, by_a_person=bool(by)))
        if unasked:
            names = _listed(_by_name(unasked))
            self.log.info("This was not asked, and the next run asks whether these shrink: %s", names)
        return result

    def _make(self, make: Callable[[EdlClient, RescalingRules, Policy], Awaitable[PassResult]]) -> PassResult:
        """Make a pass, and log what it has decided."""
        edl_connection = EdlHook(self.edl_conn_id).edl_connection()
        rules, policy = self._rules(self.windows, self.max_load), self._policy()

        async def at_the_site() -> PassResult:
            async with open_client(edl_connection) as client:
                return await make(client, rules, policy)

        result, unasked = asyncio.run(at_the_site())
        self._tell(result)
        return result, unasked

    async def _pass(self, client: EdlClient, rules: RescalingRules, policy: Policy, *, dry_run: bool) -> PassResult:
        return _result(await client.rescale(rules, dry_run=dry_run, policy=policy), dry_run=dry_run), []

    async def _approved_pass(
        self,
        client: EdlClient,
        rules: RescalingRules,
        policy: Policy,
        *,
        answers: Mapping[str, ShrinkApproval] | None = None,
        by_a_person: bool = False,
    ) -> PassResult:
        """Make a pass in which only those shrink that a person has approved, now or lately, and only so far."""
        from edl_runtime.autoscale.policy.wrappers import RequireApproval

        for name, answer in (answers or {}).items():
            await client.save_shrink_approval(name, answer, for_s=self.approval_timeout_s, unless_kept=not by_a_person)
        due = (await client.rescale(rules, dry_run=True, policy=policy)).plan
        shrinks = [one for one in due.changes if one.target < one.instances]
        said = {one.name: await client.shrink_approval(one.name) for one in shrinks}
        answered = {name: answer for name, answer in said.items() if answer}
        held = RequireApproval(answered, policy)
        done = await client.rescale(rules, dry_run=False, policy=held)
        kept = {one.name: one.target for one in done.plan.targets if one.name in held.waiting}
        unasked = [
            RescalingTarget(**{**_target(one), "instances": kept[one.name]})
            for one in shrinks
            if one.target < kept.get(one.name, 0) and (one.name not in answered or answered[one.name].approved)
        ]
        return _result(done, sorted(held.waiting)), unasked

    def _rules(self, windows: Windows | None, max_load: float | str) -> RescalingRules:
        """Return by what a plan is made. Raises SpecError."""
        from edl_runtime.autoscale.planner import RescalingRules

        return RescalingRules(
            windows=None if windows is None else load_windows(windows, folder=dag_folder(self)),
            max_load=as_number("max_load", max_load, "a share above 0, up to 1"),
            lead_s=as_number("lead_s", self.lead_s, "a number of seconds"),
        )

    def _policy(self) -> Policy:
        """Return the policy. Raises SpecError for one of one's own that is not there."""
        if self.policy is None:
            from edl_runtime.autoscale.policy.decide import decide

            return decide
        from edl_runtime.autoscale.policy.wrappers import import_policy

        return import_policy(self.policy)

    def _tell(self, result: RescalingResult) -> None:
        """Log what was decided, as a table of the jobs and pools."""
        if result["dry_run"]:
            self.log.info("A dry run: nothing is changed")
        if result["why"]:
            self.log.info("%s", result["why"])
        for note in result["notes"]:
            self.log.warning("%s", note)
        for row in targets_rows(result["targets"]):
            self.log.info("%s", row)
        for name, why in result["refused"].items():
            self.log.warning("%s could not be resized: %s", name, why)


def targets_rows(targets: Sequence[RescalingTarget]) -> list[str]:
    """Return a table in lines of text, its columns aligned: what each job or pool has, should have, and why."""
    if not targets:
        return ["No job or pool that can be resized is there"]
    cells = [("NAME", "NOW", "TARGET")]
    cells += [(one["name"], str(one["instances"]), str(one["target"])) for one in targets]
    name, now, target = (max(map(len, column)) for column in zip(*cells, strict=True))
    reasons = ["REASON", *(one["reason"] for one in targets)]
    return [
        f"{cell[0]:<{name}}  {cell[1]:>{now}}  {cell[2]:>{target}}  {reason}"
        for cell, reason in zip(cells, reasons, strict=True)
    ]


def _result(done: RescaleOutcome, waiting: Sequence[str] = (), *, dry_run: bool = False) -> RescalingResult:
    plan = done.plan
    return RescalingResult(
        at=plan.at,
        window=plan.window,
        until=plan.until,
        why=plan.why,
        capacity=plan.capacity,
        targets=[_target(one) for one in plan.targets],
        refused=done.refused,
        waiting=list(waiting),
        notes=list(plan.notes),
        dry_run=dry_run,
    )


def _by_name(targets: Sequence[RescalingTarget]) -> dict[str, int]:
    return {one["name"]: one["target"] for one in targets}


def _listed(targets: Mapping[str, int]) -> str:
    return ", ".join(f"{name} to {target}" for name, target in targets.items())


def _target(one: JobTarget) -> RescalingTarget:
    return RescalingTarget(name=one.name, kind=one.kind, instances=one.instances, target=one.target, reason=one.reason)
