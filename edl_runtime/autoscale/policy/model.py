"""The policy's input and output: frozen structs that validate themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.pods import MAX_QUANTITY
from edl_runtime.specs import Bounds

QUANTUM = 0.001
"""Resources count in thousandths, as Kubernetes' "100m" of a CPU."""


class Speedup(msgspec.Struct, frozen=True, kw_only=True):
    """How a job's speed depends on its instances.

    - `a`: n instances do `n / (1 + a (n - 1))` times the samples of one: 0 is perfect, and 1 no gain at all.
    - `phi`: the gradient's noise scale in batches of one instance. With n instances a sample is worth
      `(phi + 1) / (phi + n)` of what it is worth with one, the statistical efficiency of Pollux (Qiao et al., OSDI
      2021). Infinite, the default, is no loss.

    The defaults are for a job that was not measured: nearly perfect, so that equal jobs get equal numbers. Raises
    SpecError unless 0 <= a <= 1 and phi > 0.
    """

    a: float = 0.03
    phi: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise SpecError("speedup.a", self.a, "0 to 1")
        if not self.phi > 0:
            raise SpecError("speedup.phi", self.phi, "above 0")

    def goodput(self, instances: int) -> float:
        """Return the training speed in units of one instance; 0 for none."""
        if instances < 1:
            return 0.0
        efficiency = 1.0 if math.isinf(self.phi) else (self.phi + 1) / (self.phi + instances)
        return instances / (1 + self.a * (instances - 1)) * efficiency


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The most `instances` that a job may have now, and the `reason`, as "window 'evening' allows 2".

    Below the job's minimum it means none.
    """

    instances: int
    reason: str


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A job, or a pool, as it is now; `name` is unique among them.

    - `bounds`: the minimum and maximum of instances. It may also have none, and then waits.
    - `resources`: what one instance needs, by name as in {"gpu": 1, "cpu": 4}; at least one of them above 0. They
      count in thousandths, the rest rounded up.
    - `nodes`: the node of each instance, by index, "" for an unplaced one. When a job shrinks, the last ones leave.
    - `priority`: higher is admitted first.
    - `weight`: above 0; a job of weight 2 gets about twice the instances above its minimum.
    - `submitted_s`, `changed_s`, `resized_s`: by the clock of the policy's `now_s`: when it was submitted; when it
      started or stopped to run, by default when it was last resized, or submitted; when it was last resized, started or
      suspended, None for never.
    - `by_hand`: whether somebody has given it its size, and no pass.
    - `speedup`: as measured, None without measurements.
    - `limit`: a limit below its maximum, None without one.
    - `resumes`: whether it resumes from a checkpoint after being suspended. One that does not is never suspended while
      it runs; see `edl_runtime.autoscale.policy.interface.protected_targets`.
    - `pools`: the names of the pools that a job asks. It is started and suspended with those of them that are among
      the jobs; see `edl_runtime.autoscale.policy.groups.Group`.
    - `students`: how many use a pool now besides the jobs that name it in `pools`: while some do it is not suspended
      either; None for a job.
    - `stranded`: the indexes of further instances that lost their node, fit on no other and are left pending. All other
      fields are without them.

    Raises SpecError.
    """

    name: str
    bounds: Bounds
    resources: Mapping[str, float]
    nodes: tuple[str, ...] = ()
    priority: int = 0
    weight: float = 1.0
    submitted_s: float = 0.0
    changed_s: float | None = None
    resized_s: float | None = None
    by_hand: bool = False
    speedup: Speedup | None = None
    limit: Limit | None = None
    resumes: bool = True
    pools: tuple[str, ...] = ()
    students: int | None = None
    stranded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_quantities(f"job {self.name!r}: resources", self.resources)
        if not any(self.resources.values()):
            raise SpecError(f"job {self.name!r}: resources", dict(self.resources), "at least one quantity above 0")
        if not 0 < self.weight < math.inf:
            raise SpecError(f"job {self.name!r}: weight", self.weight, "a number above 0")

    @property
    def most(self) -> int:
        """The most instances it may have now."""
        return min(self.bounds.max, self.limit.instances) if self.limit else self.bounds.max

    @property
    def instances(self) -> int:
        """How many instances it has now, placed or not."""
        return len(self.nodes)

    @property
    def runs(self) -> bool:
        """Whether one of its instances is placed."""
        return any(self.nodes)

    @property
    def up_to_last_placed(self) -> int:
        """The fewest instances it can shrink to without removing a placed one."""
        return max((number for number, node in enumerate(self.nodes, 1) if node), default=0)

    def including_stranded(self, instances: int) -> int:
        """Return the size that leaves so many instances beside the stranded ones."""
        for index in sorted(self.stranded):
            instances += index < instances
        return instances

    @property
    def since_s(self) -> float:
        """When it started or stopped to run."""
        for known in (self.changed_s, self.resized_s):
            if known is not None:
                return known
        return self.submitted_s


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node by its `name`, and what is `free` beside the instances there, by resource. Raises SpecError.

    It has nothing of a resource that `free` does not name, even when instances with that resource leave.
    """

    name: str
    free: Mapping[str, float]

    def __post_init__(self) -> None:
        _check_quantities(f"node {self.name!r}: free", self.free)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """How many `instances` a job should have, and the `reason`.

    `nodes` is where they fit, by index. A scheduler may place new ones elsewhere.
    """

    instances: int
    reason: str
    nodes: tuple[str, ...] = ()


def milli_needed(quantity: float) -> int:
    """Return a need in thousandths, rounded up."""
    return math.ceil(round(quantity / QUANTUM, 6))


def milli_available(quantity: float) -> int:
    """Return what there is in thousandths, rounded down."""
    return math.floor(round(quantity / QUANTUM, 6))


def _check_quantities(field: str, quantities: Mapping[str, float]) -> None:
    for name, quantity in quantities.items():
        if not 0 <= quantity <= MAX_QUANTITY:
            raise SpecError(f"{field}[{name!r}]", quantity, f"a number, 0 to {MAX_QUANTITY:g}")
