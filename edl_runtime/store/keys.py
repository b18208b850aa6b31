"""Every Redis key of the project.

All keys of one pool share the hash tag `{namespace/pool}`, and all keys of one job `{namespace/job}`, so that each Lua
script touches one slot and works in Redis Cluster.

| key | type and content | lifetime | writer | reader |
| --- | --- | --- | --- | --- |
| leases | sorted set, member id → deadline in ms of the clock | a day from the last use | Lua | Lua |
| records | hash, member id → JSON of the member with its fence | as leases | Lua | Lua |
| fence | counter | as leases | register | register |
| contract | string, JSON of the pool's model signature | while there are members, and as leases | Lua | Lua |
| reports | hash, member id → JSON of its last report, with the time by the clock | as leases | Lua | Lua |
| events | stream of joined, left, expired, drained; about the last 1,000 | as leases | Lua | watchers |
| clock | hash, the clock of a pool's teachers or students, and the last join or leave | as leases | Lua | Lua |
| drained | hash, id of a member that was drained → its holder | as leases | Lua, `edl drain` | Lua, `edl register` |
| pools | set of names; readers remove those without members | a day from the last renewal | members | `edl pools` |
| traffic profile | string, JSON of the learned profile and the latest sample | 2 days | rescaling | as writer |
| progress | string, JSON of the last report | an hour from the last | Lua | Airflow, `edl jobs` |
| progress curve | sorted set, JSON of a point → its step; at most 1,000 | a day from the last | Lua | `edl jobs` |
| readers' progress | hash, instance → JSON of the last report of its reader | as progress | students | as progress |
| speeds | hash, number of instances → samples a second | a week from the last | rescaling | rescaling |
| begun by | string, the token of the task try that started the training | 30 days | Airflow | Airflow |
| orphan | string, JSON: a job whose task has left it, and since when | an hour | Airflow | Airflow, `edl jobs` |
| orphans' look | string: somebody of an Airflow has just looked for them in a place | a minute | Airflow | Airflow |
| log position | string, JSON: how much of the job's log a task has copied | a day from the last | Airflow | Airflow |
| checkpoints | stream of saved checkpoints as JSON; about the last 1,000 | 30 days from the last | agents | Airflow |
| checkpoint folder leases | sorted set, instance → deadline in ms | as holder | Lua | Lua |
| checkpoint folder holder | hash: the job, JSON about it, clock | a day from the last use | Lua | Lua |
| checkpoint folder locks | sorted set, token of a lock file → last renewal in ms | as holder | Lua | Lua |
| plan | string, JSON of a place's last pass: its plan and what failed | a day | rescaling | `edl monitor`, Airflow |
| resizes | hash, job → Unix time of the last resize by a pass | an hour from the last | rescaling | rescaling |
| rescaling | string, the lock of a place's rescaling | a minute | rescaling | rescaling |
| history | stream of what ran when in a place; about the last 10,000 | a week from the last | Lua | `edl monitor` |
| ledger:state | hash, a training's ledger of shards: generation and counts | a week from the last use | Lua | Lua |
| ledger:doing | hash, ticket → first record of its lease, and the worker | as state | Lua | Lua |
| ledger:back | sorted set, returned ticket → record to continue at | as state | Lua | Lua |
| ledger:acked | sorted set, ticket and first record of its lease → step that finished it | as state | Lua | Lua |
| ledger:failures | hash, ticket → JSON of why it failed | as state | Lua | Lua |
| ledger:names | hash, number → name of a stream's shard | as state | Lua | workers |
| ledger:answers | hash, worker → its last lease | as state | Lua | Lua |
| tasks:… | the same of a queue of tasks: see `_ledger.lua` | as state | Lua | Lua, workers |
| group leases | sorted set, member id → deadline in ms of the clock | a day from the last heartbeat | Lua | Lua |
| group records | hash, member id → JSON of the agent's member record | as above | heartbeat | Lua |
| group beats | hash, member id → fence, heartbeats, status and since when, generations | as above | heartbeat | Lua |
| group state | hash: the current generation and its state, clock, overtime, end, failures | as above | Lua | Lua |
| group events | stream of JSON; about the last 2,000 | as above | Lua | `edl events`, Airflow |
| group calls | channel, the kind of each event on which all agents act at once | none | Lua | agents |
| group news | channel, the kind of each other event | none | Lua | the agents that decide |
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Role = Literal["teachers", "students"]
ROLES: tuple[Role, Role] = ("teachers", "students")

LedgerOf = Literal["ledger", "tasks"]


class Service(msgspec.Struct, frozen=True):
    """The teachers or the students of one pool."""

    namespace: str
    pool: str
    role: Role = "teachers"


def service_key(service: Service, part: str) -> str:
    return f"edl:{{{service.namespace}/{service.pool}}}:{service.role}:{part}"


def service_keys(service: Service) -> list[str]:
    """Return the keys that every script of the registry takes, in order."""
    parts = ("leases", "records", "contract", "events", "fence", "reports", "clock", "drained")
    return [service_key(service, part) for part in parts]


def pools(namespace: str) -> str:
    return f"edl:{{{namespace}}}:pools"


def traffic_profile(namespace: str, of: str) -> str:
    """Return the key of a learned traffic profile; `of` identifies the source and the settings it was learned with."""
    return f"edl:{{{namespace}}}:traffic-profile:{of}"


def progress(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:progress"


def progress_curve(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:progress:curve"


def readers_progress(namespace: str, job: str, run: str) -> str:
    return f"edl:{{{namespace}/{job}}}:progress:readers:{run}"


def plan(namespace: str, place: str) -> str:
    return f"edl:{{{namespace}}}:plan:{place}"


def resizes(namespace: str, place: str) -> str:
    return f"edl:{{{namespace}}}:resizes:{place}"


def rescaling(namespace: str, place: str) -> str:
    return f"edl:{{{namespace}}}:rescaling:{place}"


def speeds(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:speeds"


def started_by(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:begun-by"


def orphan(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:orphan"


def orphans_look(namespace: str, place: str, airflow: str) -> str:
    return f"edl:{{{namespace}}}:orphans:{airflow}:{place}"


def log_position(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:log-position"


def checkpoints(namespace: str, stream: str) -> str:
    return f"edl:{{{namespace}/{stream}}}:checkpoints"


def checkpoint_lease(folder: str) -> list[str]:
    """Return the keys of the lease of a checkpoint folder; without a namespace, because all namespaces share it."""
    digest = hashlib.sha256(folder.encode()).hexdigest()[:32]
    return [f"edl:{{checkpoint-folder/{digest}}}:{what}" for what in ("leases", "holder", "locks")]


def history(namespace: str, place: str) -> str:
    return f"edl:{{{namespace}}}:history:{place}"


def group_events(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:group:events"


def group_state(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:group:state"


def group_keys(namespace: str, job: str) -> list[str]:
    """Return the keys and channels that every script of a trainer group takes, in order."""
    parts = ("leases", "records", "beats", "state", "events", "calls", "news")
    return [f"edl:{{{namespace}/{job}}}:group:{part}" for part in parts]


def group_channels(namespace: str, job: str) -> list[str]:
    """Return the channels of a trainer group: of what concerns all its agents, and of all else."""
    return group_keys(namespace, job)[-2:]


def ledger_keys(namespace: str, job: str, of: LedgerOf = "ledger") -> list[str]:
    """Return the keys that every script of a ledger takes, in order: that of a training, or of a queue of tasks."""
    parts = ("state", "doing", "back", "acked", "failures", "names", "answers")
    return [f"edl:{{{namespace}/{job}}}:{of}:{part}" for part in parts]
