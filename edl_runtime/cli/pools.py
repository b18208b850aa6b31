"""`edl pools`: which pools there are and who is in them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import click
import msgspec

from edl_runtime.cli.tables import print_table
from edl_runtime.errors import SpecError, UnknownPoolError
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as `edl pools` shows it; `model` is None while it has no teachers."""

    name: str
    teachers: list[Member]
    students: list[Member]
    model: ModelSignature | None


@click.command
@click.argument("name", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: a list of pools with their members, or with NAME that pool."
)
def pools(name: str | None, *, as_json: bool) -> None:
    """Show pools and the teachers and students registered in them; with NAME, the members of that pool.

    Asks the Redis of EDL_REDIS_URL about the namespace EDL_NAMESPACE.
    """
    settings = RuntimeSettings.from_env(os.environ)
    if not settings.redis_url:
        raise SpecError(
            "EDL_REDIS_URL", "nothing", "the address of the Redis that pools register in, as redis://127.0.0.1:6379/0"
        )
    views = asyncio.run(_look(settings, name))
    if as_json:
        plain = [_plain(view) for view in views]
        click.echo(msgspec.json.format(msgspec.json.encode(plain[0] if name else plain)))
    elif name:
        _print_members(views[0])
    else:
        _print_pools(views)


async def _look(settings: RuntimeSettings, name: str | None) -> list[PoolView]:
    async with connect(settings.redis_url) as client:
        directory = Directory(client, settings.namespace)
        known = await directory.pools()
        if name and name not in known:
            raise UnknownPoolError(name, settings.namespace, known)
        return [
            PoolView(
                name=pool,
                teachers=await directory.members(pool, "teachers"),
                students=await directory.members(pool, "students"),
                model=await directory.contract(pool),
            )
            for pool in ([name] if name else known)
        ]


def _plain(view: PoolView) -> dict[str, Any]:
    """Return the pool as JSON shows it: its model once, not with each teacher."""

    def plain(members: list[Member], *fields: str) -> list[dict[str, Any]]:
        return [{field: getattr(member, field) for field in fields} for member in members]

    return {
        "name": view.name,
        "model": view.model,
        "teachers": plain(view.teachers, "id", "address", "weight", "fence"),
        "students": plain(view.students, "id", "address", "want", "fence"),
    }


def _print_pools(views: list[PoolView]) -> None:
    if not views:
        click.echo("no pools have members now")
        return
    print_table(["POOL", "TEACHERS", "STUDENTS", "MODEL", "INPUTS", "OUTPUTS"], [_row(view) for view in views])


def _row(view: PoolView) -> list[str]:
    model = view.model
    described = [model.name, _tensors(model.inputs), _tensors(model.outputs)] if model else ["", "", ""]
    return [view.name, str(len(view.teachers)), str(len(view.students)), *described]


def _print_members(view: PoolView) -> None:
    teachers = [[each.id, "teacher", each.address, f"{each.weight:g}", ""] for each in view.teachers]
    students = [[each.id, "student", each.address, "", str(each.want or "all")] for each in view.students]
    print_table(["MEMBER", "ROLE", "ADDRESS", "WEIGHT", "WANTS"], [*teachers, *students])


def _tensors(tensors: tuple[TensorSpec, ...]) -> str:
    return "\n".join(f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)
