"""Brings servers that a DAG did not start into a teacher pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperatorLink, conf

from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlConnection
from edl_airflow.identity import try_token
from edl_airflow.links import TeacherPoolLink
from edl_airflow.operators.base import EdlOperator
from edl_airflow.operators.job_specs import registration_job_spec
from edl_airflow.operators.templates import (
    Arguments,
    Maybe,
    as_count,
    as_seconds,
    check_connection,
    check_deferrable,
    task_deadline,
)
from edl_airflow.results import PoolResult
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec
from edl_runtime.errors import SpecError
from edl_runtime.external.address import ServerAddress, check_distinct
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    from airflow.sdk import Context


def as_servers(field: str, value: object) -> tuple[str, ...]:
    """Return addresses of servers, each as the registry will have it. Raises SpecError naming `field`."""
    servers = value if isinstance(value, list | tuple) else ()
    addresses = [ServerAddress.parse(str(one), f"{field}[{index}]") for index, one in enumerate(servers)]
    if not addresses:
        raise SpecError(field, value, "a list of addresses, as in ['oip+http://triton:8000/resnext']")
    check_distinct(addresses, field)
    return tuple(map(str, addresses))


class EdlRegisterServersOperator(EdlOperator):
    """Bring running inference servers into a pool of teachers, and succeed when they are registered.

    For Triton, KServe, MLServer, OpenVINO Model Server and Paddle Serving, started by others. A process or pod, the job
    `POOL-servers`, runs `edl register`: each server is in the pool while its model is ready, also after the task. The
    pool may have teachers of an `EdlTeacherPoolOperator` as well. `EdlStopTeacherPoolOperator` ends both; the servers
    themselves run on.

    Returns a `PoolResult` with the servers' addresses. A task that fails leaves no registration. A server that does not
    say what its model takes, serves another model than the pool's, or refuses a request fails the task at once.

    :param teacher_pool: the pool's name, a DNS label of at most 44 letters (templated)
    :param servers: addresses, as in `["oip+http://triton:8000/resnext"]`; see docs/how-to/other-servers.md (templated)
    :param at_least: how many must be registered before the task succeeds; None for all (templated)
    :param wait_timeout_s: seconds to wait for them before the task fails
    :param edl_conn_id: the Airflow connection of type `edl` (templated); its teacher token is sent to the servers
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("teacher_pool", "servers", "at_least", "edl_conn_id")
    operator_extra_links: Sequence[BaseOperatorLink] = (TeacherPoolLink(),)
    ui_color = "#cfe2f3"
    arguments: ClassVar[Arguments] = {
        "teacher_pool": check_name,
        "servers": as_servers,
        "at_least": Maybe(as_count),
        "wait_timeout_s": as_seconds,
    }
    keeps_pool = True

    def __init__(
        self,
        *,
        teacher_pool: str,
        servers: Sequence[str],
        at_least: int | str | None = None,
        wait_timeout_s: float = 300,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.teacher_pool = teacher_pool
        self.servers = servers
        self.at_least = at_least
        self.wait_timeout_s = wait_timeout_s
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        self.check_arguments()

    def plan(self, context: Context, edl_connection: EdlConnection) -> TaskSpec:
        pool, servers = self.argument("teacher_pool"), self.argument("servers")
        at_least = self.argument("at_least") or len(servers)
        if at_least > len(servers):
            raise SpecError("at_least", at_least, f"at most the number of servers, {len(servers)}")
        return TaskSpec(
            conn_id=self.edl_conn_id,
            place=edl_connection.place,
            token=try_token(context["ti"]),
            pool=pool,
            pool_job=registration_job_spec(pool, servers, namespace=edl_connection.namespace),
            servers=servers,
            at_least=at_least,
            wait_timeout_s=self.wait_timeout_s,
            pool_deadline=time.time() + self.wait_timeout_s,
            deadline=task_deadline(self),
        )

    def check(self, folder: Path) -> None:
        """Nothing that this machine's files show."""

    def result(self, spec: TaskSpec, outcome: TaskOutcome) -> PoolResult:  # noqa: ARG002
        return outcome.pool_result()
