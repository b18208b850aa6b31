"""Teachers answer the clients that people already have: Triton's, and those of Paddle Serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.external_servers import SERVERS, WEIGHTS, environment, free_ports, run_client
from support.teachers.process import running_teacher

IMAGE = np.arange(2 * 784, dtype=np.float32).reshape(2, 784) % 11
"""What the clients send."""

CLIENT_CONFIG = """
feed_var { name: "image" alias_name: "image" is_lod_tensor: false feed_type: 1 shape: 1 shape: 28 shape: 28 }
fetch_var { name: "logits" alias_name: "logits" is_lod_tensor: false fetch_type: 1 shape: 10 }
"""


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, str]]:
    """Addresses of one teacher's servers, by protocol."""
    http, grpc, paddle = free_ports(3)
    flags = ("--port", http, "--grpc-port", grpc, "--paddle-port", paddle)
    with running_teacher("ours:net", *map(str, flags), env={"PYTHONPATH": str(SERVERS)}):
        yield {name: f"127.0.0.1:{port}" for name, port in (("http", http), ("grpc", grpc), ("paddle", paddle))}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient_gets_all_it_asks_for(protocol: str, ports: dict[str, str], tmp_path: Path) -> None:
    """Health, metadata, configuration, statistics, answers, and refusals that name what is wrong."""
    found = run_client("triton", "triton_client.py", protocol, ports[protocol], cwd=tmp_path)
    assert found["ready"] == [True, True, True]
    assert not found["unknown"]
    assert found["server"]["name"] == "edl-airflow"
    assert [tensor["name"] for tensor in found["metadata"]["inputs"]] == ["image"]
    assert found["config"]["output"][0]["data_type"] == "TYPE_FP32"
    assert found["logits"] == (IMAGE @ WEIGHTS).tolist()
    assert found["id"] == "seven"
    assert int(found["statistics"]["inference_stats"]["success"]["count"]) >= 1
    assert "served is" in found["refused"]["model"][1]
    assert "INT64" in found["refused"]["dtype"][1]
    assert "nothing" in found["refused"]["output"][1]


@pytest.mark.parametrize("how", [[], ["json"], ["gzip"], ["json", "gzip"], ["grpc"]], ids=" ".join)
def test_paddle_servings_http_client_gets_answers(how: list[str], ports: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "serving_client_conf.prototxt").write_text(CLIENT_CONFIG)
    numbers, shape = run_client("paddle-serving", "paddle_http_client.py", ports["paddle"], *how, cwd=tmp_path)
    assert np.array_equal(np.reshape(numbers, shape), IMAGE @ WEIGHTS)


def test_paddle_servings_brpc_client_gets_answers(ports: dict[str, str], tmp_path: Path) -> None:
    """By baidu_std. The client needs libraries that systems no longer have, which `make interop` brings."""
    libraries = environment("paddle-serving") / "brpc"
    if not libraries.exists():
        pytest.skip("there is no compiler, or no shared libpython3.8, for what the brpc client needs")
    (tmp_path / "serving_client_conf.prototxt").write_text(CLIENT_CONFIG)
    env = json.loads((libraries / "environ.json").read_text())
    numbers, shape = run_client("paddle-serving", "paddle_brpc_client.py", ports["paddle"], cwd=tmp_path, env=env)
    assert np.array_equal(np.reshape(numbers, shape), IMAGE @ WEIGHTS)
