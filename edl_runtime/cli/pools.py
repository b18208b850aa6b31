"""`edl pools`: pools and their members."""

from __future__ import annotations

import asyncio

import click

from edl_runtime.cli.completion import pool_names
from edl_runtime.cli.options import print_json, print_table, read_settings
from edl_runtime.discovery.client import DiscoveryClient
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import TensorSpec
from edl_runtime.registry.pools import PoolInfo, StudentInfo, TeacherInfo, get_pool, list_pools
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect


@click.command
@click.argument("name", required=False, shell_complete=pool_names)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: a list of pools with their members, or with NAME that pool."
)
def pools(name: str | None, *, as_json: bool) -> None:
    """Show pools and the teachers and students registered in them; with NAME, the members of that pool.

    BUSY is the share of the last ten seconds in which teachers worked, WAITING that in which students waited for them;
    for a pool, the mean of the members that report it.

    Students send no requests to a teacher in quarantine for a while, because it answered badly.

    Uses the Redis of EDL_REDIS_URL and the namespace EDL_NAMESPACE; without it, the `edl discovery` at
    EDL_DISCOVERY_URL.
    """
    settings = read_settings()
    if not (settings.redis_url or settings.discovery_url):
        allowed = "the Redis that pools register in, as redis://127.0.0.1:6379/0, or EDL_DISCOVERY_URL in its place"
        raise SpecError("EDL_REDIS_URL", "", allowed)
    views = asyncio.run(_read(settings, name))
    if as_json:
        print_json(views[0] if name else views)
    elif name:
        _print_members(views[0])
    else:
        _print_pools(views)


async def _read(settings: RuntimeSettings, name: str | None) -> list[PoolInfo]:
    if not settings.redis_url:
        async with DiscoveryClient(settings.discovery_url, settings.discovery_token) as discovery:
            return [await discovery.pool(name)] if name else await discovery.pools()
    async with connect(settings.redis_url) as client:
        if name:
            return [await get_pool(client, settings.namespace, name)]
        return await list_pools(client, settings.namespace)


def _print_pools(views: list[PoolInfo]) -> None:
    if not views:
        click.echo("no pool has members")
        return
    headings = ["POOL", "TEACHERS", "BUSY", "QUARANTINED", "STUDENTS", "WAITING", "MODEL", "INPUTS", "OUTPUTS"]
    print_table(headings, [_row(view) for view in views])


def _row(view: PoolInfo) -> list[str]:
    model = view.model
    described = [model.name, _tensors(model.inputs), _tensors(model.outputs)] if model else [view.problem, "", ""]
    demand = view.demand
    return [
        view.name,
        str(len(view.teachers)),
        _share(demand.busy),
        str(view.quarantined),
        str(len(view.students)),
        _share(demand.waiting),
        *described,
    ]


def _print_members(view: PoolInfo) -> None:
    teachers = [
        [each.id, "teacher", each.address, f"{each.weight:g}", "", _busy(each), "", str(each.quarantine or "")]
        for each in view.teachers
    ]
    students = [
        [each.id, "student", each.address, "", str(each.want or "all"), "", _waiting(each), ""]
        for each in view.students
    ]
    headings = ["MEMBER", "ROLE", "ADDRESS", "WEIGHT", "WANTS", "BUSY", "WAITING", "QUARANTINE"]
    print_table(headings, [*teachers, *students])


def _busy(teacher: TeacherInfo) -> str:
    return _share(teacher.report.busy if teacher.report else None)


def _waiting(student: StudentInfo) -> str:
    return _share(student.report.waiting if student.report else None)


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _tensors(tensors: tuple[TensorSpec, ...]) -> str:
    return "\n".join(f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)
