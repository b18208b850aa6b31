"""A teacher that reads a request, drops it and answers at once: what is left is the cost of everything around models.

Serves one of the data sets of `_data.py` by the real front, prints its address and ends when its input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from _data import DATA, LOGITS

from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.teacher.arena import Arena
from edl_runtime.teacher.runner import InlineRunner
from edl_runtime.teacher.server import Front

AREA_BYTES = 256 * 1024 * 1024


class InstantModel:
    """Answers zeros."""

    def __init__(self, signature: ModelSignature) -> None:
        self.signature = signature

    def run(
        self, inputs: Mapping[str, npt.NDArray[np.generic]], outputs: Sequence[str]
    ) -> dict[str, npt.NDArray[np.float32]]:
        rows = len(next(iter(inputs.values())))
        return {name: np.zeros((rows, LOGITS), np.float32) for name in outputs}


async def main(data: str) -> None:
    arena = Arena.create(AREA_BYTES)
    signature = DATA[data].signature
    front = Front(signature, InlineRunner(InstantModel(signature), arena), arena)
    server = await asyncio.get_running_loop().create_server(front.connect, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"{host}:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1]))
