"""Every Redis key of the project is born here.

All keys of one pool share the hash tag `{namespace/pool}`, all keys of one job `{namespace/job}`, so that each Lua
script touches one slot and Redis Cluster works.

| key | type and content | lifetime | writer | reader |
| --- | --- | --- | --- | --- |
| leases | sorted set, member id → deadline in ms of the clock | a day from the last use | Lua | Lua |
| records | hash, member id → JSON of the member with its fence | as leases | Lua | Lua |
| fence | counter | as leases | register | register |
| contract | string, the pool's model signature as JSON | while there are members, and as leases | Lua | Lua |
| reports | hash, member id → JSON of what it last reported, and when by the clock | as leases | Lua | Lua |
| events | stream of joined, left, expired; the last 1,000 or so | as leases | Lua | watchers |
| clock | hash, the clock of a pool's teachers or students, and when one came or went | as leases | Lua | Lua |
| pools | set of names; readers drop those without members | a day from the last member's word | members | `edl pools` |
| traffic profile | string, JSON of what the web has taught, and its latest sample | 2 days | rescaling | as writer |
| quarantine | string, JSON of teachers a student shuns, address → why | 10 s from the last | student | `edl pools` |
| progress | string, JSON of the last report | an hour from the last | student | Airflow, `edl jobs` |
| readers' progress | hash, instance → JSON of the last report of its reader | as progress | students | as progress |
| speeds | hash, instances → samples a second with so many | a week from the last | who rescales | who rescales |
| begun by | string, the token of the try whose training it is | 30 days | Airflow | Airflow |
| log position | string, JSON of how much of the job's log is in a task's | a day from the last | Airflow | Airflow |
| checkpoints | stream of those that landed, as JSON; the last 1,000 or so | 30 days from the last | agents | Airflow |
| place leases | sorted set, instances whose job keeps checkpoints there → deadline in ms | as holder | Lua | Lua |
| place holder | hash: that job, JSON of whose it is and since when, clock | a day from the last use | Lua | Lua |
| plan | string, JSON of the last rescaling's plan | a day | who rescales | `edl monitor`, Airflow |
| rescaling | string, the lock of who rescales | a minute | who rescales | who rescales |
| shrink answer | string, whether a job may shrink: yes or no | as long as the answer holds | Airflow | Airflow |
| history | stream of what ran when, as JSON; the last 10,000 or so | a week from the last | Lua | `edl monitor` |
| ledger:state | hash, a ledger of shards: fence and counts | a week from the last use | Lua | Lua |
| ledger:doing | hash, ticket → where its lease began, and whose it is | as state | Lua | Lua |
| ledger:back | sorted set, ticket that came back → record to go on at | as state | Lua | Lua |
| ledger:acked | sorted set, ticket and where its lease began → step that finished it | as state | Lua | Lua |
| ledger:failures | hash, ticket → JSON of why it failed | as state | Lua | Lua |
| ledger:names | hash, number → name of a stream's shard | as state | Lua | workers |
| ledger:answers | hash, worker → what it was last leased | as state | Lua | Lua |
| group leases | sorted set, member id → deadline in ms of the group's clock | a day from the last beat | Lua | Lua |
| group records | hash, member id → JSON of the trainers' member | as above | beat | Lua |
| group beats | hash, member id → its fence, last beats, standing and since when, generations | as above | beat | Lua |
| group state | hash: the generation that counts and its state, clock, overtime, end, falls | as above | Lua | Lua |
| group events | stream of JSON; the last 2,000 or so | as above | Lua | agents, `edl events` |
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Role = Literal["teachers", "students"]
ROLES: tuple[Role, Role] = ("teachers", "students")


class Service(msgspec.Struct, frozen=True):
    """Whose leases: the teachers, or the students, of one pool."""

    namespace: str
    pool: str
    role: Role = "teachers"


def leases(service: Service) -> str:
    return _service_key(service, "leases")


def records(service: Service) -> str:
    return _service_key(service, "records")


def fence(service: Service) -> str:
    return _service_key(service, "fence")


def contract(service: Service) -> str:
    return _service_key(service, "contract")


def events(service: Service) -> str:
    return _service_key(service, "events")


def reports(service: Service) -> str:
    return _service_key(service, "reports")


def clock(service: Service) -> str:
    return _service_key(service, "clock")


def pools(namespace: str) -> str:
    return f"edl:{{{namespace}}}:pools"


def traffic_profile(namespace: str, of: str) -> str:
    """Return the key of what was learned from one source: `of` differs where another profile would be learned."""
    return f"edl:{{{namespace}}}:traffic-profile:{of}"


def quarantine(namespace: str, pool: str, student_id: str) -> str:
    return f"edl:{{{namespace}/{pool}}}:students:quarantine:{student_id}"


def progress(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:progress"


def readers_progress(namespace: str, job: str, run: str) -> str:
    return f"edl:{{{namespace}/{job}}}:progress:readers:{run}"


def plan(namespace: str) -> str:
    return f"edl:{{{namespace}}}:plan"


def rescaling(namespace: str) -> str:
    return f"edl:{{{namespace}}}:rescaling"


def speeds(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:speeds"


def started_by(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:begun-by"


def log_position(namespace: str, job: str) -> str:
    return f"edl:{{{namespace}/{job}}}:log-position"


def checkpoints(namespace: str, stream: str) -> str:
    return f"edl:{{{namespace}/{stream}}}:checkpoints"


def place_keys(place: str) -> list[str]:
    """Return the keys of who keeps checkpoints at a place. No namespace's own: the place is not, either."""
    digest = hashlib.sha256(place.encode()).hexdigest()[:32]
    return [f"edl:{{place/{digest}}}:{what}" for what in ("leases", "holder")]


def history(namespace: str) -> str:
    return f"edl:{{{namespace}}}:history"


def group_events(namespace: str, job: str) -> str:
    return _group_key(namespace, job, "events")


def group_state(namespace: str, job: str) -> str:
    return _group_key(namespace, job, "state")


def group_keys(namespace: str, job: str) -> list[str]:
    """Return the keys that every script of a trainer group takes, in its order."""
    return [_group_key(namespace, job, what) for what in ("leases", "records", "beats", "state", "events")]


def _group_key(namespace: str, job: str, what: str) -> str:
    return f"edl:{{{namespace}/{job}}}:group:{what}"


def service_keys(service: Service) -> list[str]:
    """Return the keys that every Lua script takes first, in its order."""
    parts = (leases, records, contract, events, fence, reports, clock)
    return [part(service) for part in parts]


def _service_key(service: Service, what: str) -> str:
    return f"edl:{{{service.namespace}/{service.pool}}}:{service.role}:{what}"


def ledger_keys(namespace: str, job: str) -> list[str]:
    """Return the keys that every Lua script of a ledger takes, in its order."""
    parts = ("state", "doing", "back", "acked", "failures", "names", "answers")
    return [_ledger_key(namespace, job, part) for part in parts]


def ledger_names(namespace: str, job: str) -> str:
    return _ledger_key(namespace, job, "names")


def _ledger_key(namespace: str, job: str, part: str) -> str:
    return f"edl:{{{namespace}/{job}}}:ledger:{part}"
