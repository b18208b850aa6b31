"""`edl pools`, as a person runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.registry.discovery_process import running_discovery

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.cli.pools import pools
from edl_runtime.discovery.errors import DiscoveryRefusedError
from edl_runtime.errors import SpecError
from edl_runtime.monitor.snapshot import MonitorSnapshot, take_snapshot
from edl_runtime.pool_reports import StudentReport, TeacherReport
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry.errors import UnknownPoolError
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.keys import Role, Service
from edl_runtime.store.redis_client import connect, run_script

DIGITS = ModelSignature(
    name="digits", inputs=(TensorSpec("image", "FP32", (-1, 784)),), outputs=(TensorSpec("logits", "FP32", (-1, 10)),)
)
MEMBERS: list[tuple[str, Role, Member]] = [
    ("digits", "teachers", Member(id="t0", address="h:1", signature=DIGITS, weight=2.0)),
    ("digits", "teachers", Member(id="t1", address="h:2", signature=DIGITS)),
    ("digits", "students", Member(id="s0", address="here", want=3)),
    ("waiting", "students", Member(id="s[red]1", address="there")),
]
BUSY = TeacherReport(busy=0.254, over_s=9.0)
WAITING = StudentReport(waiting=0.5, asked=1.5, samples_per_s=80.0, quarantined={"h:2": "answered a wrong shape"})


@pytest.fixture
def populated(redis_url: str, namespace: str) -> Iterator[dict[str, str]]:
    """Two pools, and the environment to see them."""

    async def populate(stack: contextlib.AsyncExitStack) -> None:
        client = await stack.enter_async_context(connect(redis_url))
        for pool, role, member in MEMBERS:
            await stack.enter_async_context(hold_lease(client, Service(namespace, pool, role), member, ttl_s=600))

    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        runner.run(populate(stack))
        yield {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "COLUMNS": "140"}
        runner.run(stack.aclose())


@pytest.fixture
def reported(populated: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The same, when one of each role has just said what it does, and one teacher is in quarantine."""
    monkeypatch.setattr("edl_runtime.registry.pools.STALE_AFTER_S", 600.0)
    namespace = populated["EDL_NAMESPACE"]

    async def say() -> None:
        async with connect(populated["EDL_REDIS_URL"]) as client:
            roles: list[tuple[Role, str, msgspec.Struct]] = [("teachers", "t0", BUSY), ("students", "s0", WAITING)]
            for role, member, report in roles:
                service = Service(namespace, "digits", role)
                [record] = await client.hmget(keys.service_key(service, "records"), [member])
                held = msgspec.json.decode(record)
                words = [member, held["holder"], 600_000, msgspec.json.encode(report).decode()]
                assert await run_script(client, "renew", keys.service_keys(service), words) == str(held["fence"])

    asyncio.run(say())
    return populated


def run(env: dict[str, str], *args: str) -> Result:
    return CliRunner(env=env).invoke(pools, args, catch_exceptions=True)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_table_shows_each_pool(reported: dict[str, str]) -> None:
    """Teachers, how busy, those in quarantine, students, how much they wait, the model; nothing where nobody says."""
    result = run(reported)
    assert result.exit_code == 0
    [digits] = [cells(line) for line in result.output.splitlines() if "digits" in line]
    assert digits == ["digits", "2", "25 %", "1", "1", "50 %", "digits", "image FP32 [-1, 784]", "logits FP32 [-1, 10]"]
    [waiting] = [cells(line) for line in result.output.splitlines() if "waiting" in line]
    assert waiting == ["waiting", "0", "0", "1"]


@pytest.mark.parametrize("part", ["records", "reports"])
def test_a_pool_that_cant_be_read_is_shown_among_the_others(
    populated: dict[str, str], part: str, tmp_path: Path
) -> None:
    """Why is beside its name; asked for by name, it is the error. The monitor says so, too, and shows all else."""
    namespace = populated["EDL_NAMESPACE"]
    key = keys.service_key(Service(namespace, "waiting", "students"), part)

    async def damage() -> MonitorSnapshot:
        async with connect(populated["EDL_REDIS_URL"]) as client:
            await client.delete(key)
            await client.set(key, "?")
            try:
                return await take_snapshot(LocalBackend(tmp_path), client, namespace)
            finally:
                tables.extend([await asyncio.to_thread(run, populated, *words) for words in ([], ["waiting"])])
                await client.delete(key)

    tables: list[Result] = []
    seen = asyncio.run(damage())
    assert {line.name: line.teachers for line in seen.pools} == {"digits": 2, "waiting": None}
    assert any(lack.startswith("pool 'waiting': ") and "WRONGTYPE" in lack for lack in seen.lacks), seen.lacks
    rows = [cells(line) for line in tables[0].output.splitlines()]
    assert any(row[:3] == ["digits", "2", "0"] for row in rows)
    assert any(row[0] == "waiting" and "WRONGTYPE" in row[-1] for row in rows if row), rows
    assert isinstance(tables[1].exception, MalformedRecordError)


def test_a_name_shows_its_members(reported: dict[str, str]) -> None:
    """As they call themselves, what they say of their work, and why and for how many one is in quarantine."""
    assert [cells(line) for line in run(reported, "digits").output.splitlines()[-3:]] == [
        ["t0", "teacher", "h:1", "2", "25 %"],
        ["t1", "teacher", "h:2", "1", "answered a wrong shape (by 1 student)"],
        ["s0", "student", "here", "3", "50 %"],
    ]
    assert "s[red]1" in run(reported, "waiting").output


def test_json_has_it_all(reported: dict[str, str]) -> None:
    """A program reads the same, with the model once."""
    [digits, waiting] = json.loads(run(reported, "--json").output)
    assert digits["name"] == "digits"
    assert digits["model"]["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 784]}]
    kept_away = {"reason": "answered a wrong shape", "students": 1}
    fields = ("id", "address", "weight", "quarantine", "report")
    assert [tuple(teacher[field] for field in fields) for teacher in digits["teachers"]] == [
        ("t0", "h:1", 2.0, None, msgspec.to_builtins(BUSY)),
        ("t1", "h:2", 1.0, kept_away, None),
    ]
    [student] = digits["students"]
    assert (student["id"], student["want"], student["report"]) == ("s0", 3, msgspec.to_builtins(WAITING))
    assert waiting["model"] is None
    assert json.loads(run(reported, "digits", "--json").output) == digits


def test_an_unknown_pool_is_an_error(populated: dict[str, str]) -> None:
    """A person learns which pools there are, and where else to look."""
    for words in (["absent"], ["absent", "--json"]):
        error = run(populated, *words).exception
        assert isinstance(error, UnknownPoolError)
        assert "there are: digits, waiting" in str(error)
        assert populated["EDL_NAMESPACE"] in str(error)


def test_behind_an_endpoint_the_same_is_shown(populated: dict[str, str]) -> None:
    """Without a Redis to reach, the discovery endpoint is asked; an unknown pool and a wrong token are errors."""
    settings = RuntimeSettings.from_env(populated)
    with running_discovery(settings, env={"EDL_DISCOVERY_TOKEN": "t0ken"}) as endpoint:
        env = {"EDL_DISCOVERY_URL": endpoint.url, "EDL_DISCOVERY_TOKEN": "t0ken", "COLUMNS": "140"}
        for words in ([], ["--json"], ["digits"], ["digits", "--json"]):
            assert run(env, *words).output == run(populated, *words).output
        unknown, refused = run(env, "absent").exception, run({**env, "EDL_DISCOVERY_TOKEN": "wr0ng"}).exception
    assert isinstance(unknown, DiscoveryRefusedError)
    assert "there are: digits, waiting" in str(unknown)
    assert isinstance(refused, DiscoveryRefusedError)
    assert "wr0ng" not in str(refused)


def test_an_empty_namespace_is_reported(redis_url: str, namespace: str) -> None:
    """Nothing to show is not an empty table."""
    result = run({"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace})
    assert result.output == "no pool has members\n"


def test_without_an_address_the_error_names_the_variable() -> None:
    """A person learns what to set."""
    error = run({"EDL_REDIS_URL": ""}).exception
    assert isinstance(error, SpecError)
    assert "EDL_REDIS_URL" in str(error)
    assert "EDL_DISCOVERY_URL" in str(error)
