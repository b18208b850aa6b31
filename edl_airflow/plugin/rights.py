"""What a user may see and do."""

from __future__ import annotations

import msgspec


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may do, by the ids of DAGs, of which "" stands for jobs that no DAG has started.

    - `sees`, `reads_log`, `changes`: jobs of these DAGs.
    - `cluster`: whether they see the cluster's activity, and pools that no DAG has started.
    """

    sees: frozenset[str]
    reads_log: frozenset[str]
    changes: frozenset[str]
    cluster: bool

    @property
    def runs_policy(self) -> bool:
        """Whether they may run the policy, which resizes jobs of all DAGs."""
        return "" in self.changes
