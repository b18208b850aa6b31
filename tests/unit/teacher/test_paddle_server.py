"""The server for clients of Paddle Serving, without a model."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import numpy as np
import pytest

from edl_runtime.protocol.infer_messages import REQUEST_JSON_LIMIT
from edl_runtime.protocol.paddle_serving import GENERAL, GENERAL_PATH, arrays_of_tensors, fill_tensor
from edl_runtime.teacher.paddle_server import GeneralModelService, serving_paddle


class Sums:
    """Answers requests with the sum of their input."""

    async def infer(self, inputs: dict[str, np.ndarray], _: list[str]) -> dict[str, np.ndarray]:
        return {"sum": inputs["x"].sum(keepdims=True)}


async def answer_of(content: bytes, kind: str) -> tuple[int, bytes]:
    """Return status and body of the answer to a POST."""
    requests: Any = Sums()
    async with serving_paddle(GeneralModelService(requests), "127.0.0.1", 0) as port, aiohttp.ClientSession() as client:
        url = f"http://127.0.0.1:{port}{GENERAL_PATH}"
        async with client.post(url, data=io.BytesIO(content), headers={"Content-Type": kind}) as answer:
            return answer.status, await answer.read()


@pytest.mark.parametrize("numbers", [10, 1_000_000])
async def test_a_batch_of_images_is_answered_over_http(numbers: int) -> None:
    """Requests of some megabytes are common."""
    request = GENERAL["Request"]()
    fill_tensor(request.tensor.add(name="x", alias_name="x"), np.ones(numbers, np.float32))
    status, content = await answer_of(request.SerializeToString(), "application/proto")
    assert status == 200
    (output,) = GENERAL["Response"].FromString(content).outputs
    assert arrays_of_tensors(output.tensor, "output")["sum"] == numbers


async def test_json_has_a_limit() -> None:
    """It is parsed by the event loop, which has other clients; the answer says what to send instead."""
    status, content = await answer_of(b" " * (REQUEST_JSON_LIMIT + 1), "application/json")
    assert status == 400
    assert b"allowed are 8388608; send protobuf" in content
