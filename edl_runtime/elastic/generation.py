"""Who trains together: the plain data that agents agree on through Redis, and the next generation as a function of it.

Times are Unix seconds of Redis's clock.
"""

from __future__ import annotations

import msgspec

from edl_runtime.elastic.messages import Gear


class TrainerMember(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's agent, as it registers itself with each beat.

    - `id`: "INDEX-BOOT": the instance's number in its job, and a word that is new with each start of its agent.
    - `host`, `store_port`, `trainer_port`: where its trainer listens when it is rank 0, and what a script of
      `paddle.distributed` takes for its own endpoint.
    - `ready`: its trainer is loaded and can be in a generation. `leaving`: it has been told to go.
    - `live`: its trainer can go on to the next generation by itself. `standby`: another process is loaded.
    - `gear`: the fastest gear that the job's owner allows.
    - `up`: the last generation that its trainer was up in, 0 for none; `step`: its last step, 0 for none.
    - `finished`: its trainer has trained all there is.
    - `seen`: the highest generation that it knows of, also from checkpoints; a new number is above.
    - `fence`: from Redis, larger than those of all who registered before.
    """

    id: str
    index: int
    host: str = "127.0.0.1"
    store_port: int = 0
    trainer_port: int = 0
    ready: bool = False
    leaving: bool = False
    live: bool = False
    standby: bool = False
    gear: Gear = "live"
    up: int = 0
    step: int = 0
    finished: bool = False
    seen: int = 0
    fence: int = 0


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One membership of a trainer group. A member's rank is its place in `members` (ids).

    `store`: "host:port" where rank 0 listens; `endpoints`: those of all ranks, for scripts of `paddle.distributed`.
    `reason`: why there is a new one, in words. `after`: the number of the one before, 0 for none.
    """

    number: int
    members: tuple[str, ...]
    store: str
    endpoints: tuple[str, ...]
    gear: Gear
    reason: str
    proposed_by: str
    proposed_at: float
    after: int = 0
