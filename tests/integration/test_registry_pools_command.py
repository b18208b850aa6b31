"""`edl pools`, as a person runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.registry.discovery_process import running_discovery

from edl_runtime.cli.pools import pools
from edl_runtime.errors import DiscoveryRefusedError, SpecError, UnknownPoolError
from edl_runtime.pool_reports import StudentReport, TeacherReport
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry import quarantine
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.client import connect, run_script
from edl_runtime.store.keys import Role, Service

DIGITS = ModelSignature(
    name="digits", inputs=(TensorSpec("image", "FP32", (-1, 784)),), outputs=(TensorSpec("logits", "FP32", (-1, 10)),)
)
MEMBERS: list[tuple[str, Role, Member]] = [
    ("digits", "teachers", Member(id="t0", address="h:1", signature=DIGITS, weight=2.0)),
    ("digits", "teachers", Member(id="t1", address="h:2", signature=DIGITS)),
    ("digits", "students", Member(id="s0", address="here", want=3)),
    ("waiting", "students", Member(id="s[red]1", address="there")),
]


@pytest.fixture
def populated(redis_url: str, namespace: str) -> Iterator[dict[str, str]]:
    """Two pools, and the environment to see them."""

    async def populate(stack: contextlib.AsyncExitStack) -> None:
        client = await stack.enter_async_context(connect(redis_url))
        for pool, role, member in MEMBERS:
            await stack.enter_async_context(hold_lease(client, Service(namespace, pool, role), member, ttl_s=60))

    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        runner.run(populate(stack))
        yield {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "COLUMNS": "120"}
        runner.run(stack.aclose())


def run(env: dict[str, str], *args: str) -> Result:
    return CliRunner(env=env).invoke(pools, args, catch_exceptions=True)


def test_a_table_shows_each_pool(populated: dict[str, str]) -> None:
    """Name, number of teachers, of those in quarantine and of students, model, inputs and outputs."""
    result = run(populated)
    assert result.exit_code == 0
    [digits] = [line for line in result.output.splitlines() if "digits" in line]
    cells = [cell for cell in digits.split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "digits",
        "2",
        "0",
        "1",
        "digits",
        "image FP32 [-1, 784]",
        "logits FP32 [-1, 10]",
    ]
    assert "waiting" in result.output


def test_a_name_shows_its_members(populated: dict[str, str]) -> None:
    """Who is in the pool, as they call themselves."""
    assert [word for word in ("t0", "h:1", "t1", "s0", "here") if word not in run(populated, "digits").output] == []
    assert "s[red]1" in run(populated, "waiting").output


def test_a_teacher_in_quarantine_is_shown_with_the_reason(populated: dict[str, str]) -> None:
    """Why, and by how many students, in the table and in JSON; all pools' table counts such teachers."""
    quarantined(populated, {"h:2": "answered a wrong shape"})
    [line] = [line for line in run(populated, "digits").output.splitlines() if "h:2" in line]
    assert line.rstrip().endswith("answered a wrong shape (by 1 student)")
    [digits] = [line for line in run(populated).output.splitlines() if "digits" in line]
    assert digits.split()[1:4] == ["2", "1", "1"]
    shown = json.loads(run(populated, "digits", "--json").output)["teachers"]
    assert [teacher["quarantine"] for teacher in shown] == [None, {"reason": "answered a wrong shape", "students": 1}]


def quarantined(env: dict[str, str], reasons: dict[str, str]) -> None:
    async def publish() -> None:
        async with connect(env["EDL_REDIS_URL"]) as client:
            await quarantine.publish(client, env["EDL_NAMESPACE"], "digits", "s0", reasons)

    asyncio.run(publish())


def test_who_is_busy_and_who_waits_is_shown(populated: dict[str, str]) -> None:
    """Of those that say, in the tables and in JSON."""
    service = Service(populated["EDL_NAMESPACE"], "digits")
    busy, waiting = TeacherReport(busy=0.254, over_s=9.0), StudentReport(waiting=0.5, asked=1.5, samples_per_s=80.0)
    assert run(populated).output.count(" %") == 0
    reported(populated, service, "t0", busy)
    reported(populated, msgspec.structs.replace(service, role="students"), "s0", waiting)
    [digits] = [line for line in run(populated).output.splitlines() if "digits" in line]
    assert " ".join(digits.split()[1:8]) == "2 25 % 0 1 50 %"
    lines = run(populated, "digits").output.splitlines()
    assert [next(line for line in lines if member in line).count(" %") for member in ("t0", "t1", "s0")] == [1, 0, 1]
    shown = json.loads(run(populated, "digits", "--json").output)
    assert [teacher["report"] for teacher in shown["teachers"]] == [{"busy": 0.254, "over_s": 9.0}, None]
    assert shown["students"][0]["report"] == msgspec.to_builtins(waiting)


def reported(env: dict[str, str], service: Service, member: str, report: msgspec.Struct) -> None:
    async def say() -> None:
        async with connect(env["EDL_REDIS_URL"]) as client:
            [record] = await client.hmget(keys.records(service), [member])
            fence = msgspec.json.decode(record)["fence"]
            args = [member, fence, 60_000, msgspec.json.encode(report).decode(), ""]
            assert await run_script(client, "renew", keys.of_service(service), args) == str(fence)

    asyncio.run(say())


def test_a_pool_that_nobody_is_in_is_an_error(populated: dict[str, str]) -> None:
    """A person learns which pools there are, and where else to look."""
    for words in (["absent"], ["absent", "--json"]):
        error = run(populated, *words).exception
        assert isinstance(error, UnknownPoolError)
        assert "there are: digits, waiting" in str(error)
        assert populated["EDL_NAMESPACE"] in str(error)


def test_json_has_it_all(populated: dict[str, str]) -> None:
    """A program reads the same, with the model once."""
    [digits, waiting] = json.loads(run(populated, "--json").output)
    assert digits["name"] == "digits"
    assert digits["model"]["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 784]}]
    assert [(teacher["id"], teacher["address"], teacher["weight"]) for teacher in digits["teachers"]] == [
        ("t0", "h:1", 2.0),
        ("t1", "h:2", 1.0),
    ]
    assert [(student["id"], student["want"]) for student in digits["students"]] == [("s0", 3)]
    assert waiting["model"] is None
    assert json.loads(run(populated, "digits", "--json").output) == digits


def test_behind_an_endpoint_the_same_is_shown(populated: dict[str, str]) -> None:
    """Without a Redis to reach, the discovery endpoint is asked; an unknown pool and a wrong token are errors."""
    settings = RuntimeSettings.from_env(populated)
    with running_discovery(settings, env={"EDL_DISCOVERY_TOKEN": "t0ken"}) as endpoint:
        env = {"EDL_DISCOVERY_URL": endpoint.url, "EDL_DISCOVERY_TOKEN": "t0ken", "COLUMNS": "120"}
        for words in ([], ["--json"], ["digits"], ["digits", "--json"]):
            assert run(env, *words).output == run(populated, *words).output
        unknown, refused = run(env, "absent").exception, run({**env, "EDL_DISCOVERY_TOKEN": "wr0ng"}).exception
    assert isinstance(unknown, DiscoveryRefusedError)
    assert "there are: digits, waiting" in str(unknown)
    assert isinstance(refused, DiscoveryRefusedError)
    assert "wr0ng" not in str(refused)


def test_a_namespace_without_pools_says_so(redis_url: str, namespace: str) -> None:
    """Nothing to show is not an empty table."""
    result = run({"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace})
    assert result.output == "no pools have members now\n"


def test_without_an_address_the_error_names_the_variable() -> None:
    """A person learns what to set."""
    error = run({"EDL_REDIS_URL": ""}).exception
    assert isinstance(error, SpecError)
    assert "EDL_REDIS_URL" in str(error)
    assert "EDL_DISCOVERY_URL" in str(error)
