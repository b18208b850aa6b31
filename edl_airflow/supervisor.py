"""The one use of Airflow's private SUPERVISOR_COMMS, the channel from a task to its supervisor.

Nothing public tells whether connections can be looked up without blocking, as they can't under `dag.test()`, nor which
question Airflow shows a person: its own `upsert_hitl_detail` drops the reply.
"""

from __future__ import annotations

from airflow.sdk.execution_time.comms import CreateHITLDetailPayload, HITLDetailRequestResult


def lacks_async_channel() -> bool:
    """Whether Airflow can look connections up in a blocking way only.

    So it is where `dag.test()` runs a trigger in its own process: the stand-in for the supervisor has no `asend`, and
    Airflow takes that for a connection that its database does not have.
    """
    from airflow.sdk.execution_time import task_runner

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return comms is not None and not hasattr(comms, "asend")


def ask_person(asked: CreateHITLDetailPayload) -> HITLDetailRequestResult:
    """Ask, and return the question that Airflow shows. Airflow's own `upsert_hitl_detail` drops the reply."""
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

    shown = SUPERVISOR_COMMS.send(msg=asked)
    assert isinstance(shown, HITLDetailRequestResult)  # noqa: S101 - an error is raised
    return shown
