"""This node, among those that a JobServer has."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache

from edl_runtime.demo.pod_sets import Pod, PodSet


def local_pods(pods: PodSet) -> dict[str, Pod]:
    """Return the pods that are on this node, by id."""
    own = _own_addresses()
    return {pod.pod_id: pod for pod in pods.pods if pod.addr in own}


@cache
def _own_addresses() -> frozenset[str]:
    """Return this node's names and addresses; its name need not resolve to one that others know."""
    import psutil

    name = socket.gethostname()
    named = {"localhost", name}
    with suppress(OSError):
        named.add(socket.gethostbyname(name))
    return frozenset(named | {each.address for of_one in psutil.net_if_addrs().values() for each in of_one})
