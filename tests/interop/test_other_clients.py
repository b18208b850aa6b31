"""Teachers answer the clients that people already have: Triton's, KServe's, and those of Paddle Serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.external_servers import SERVERS, WEIGHTS, environment, run_client
from support.network.ports import free_ports
from support.teachers.process import running_teacher

IMAGE = np.arange(2 * 784, dtype=np.float32).reshape(2, 784) % 11
"""What the clients send."""

CLIENT_CONFIG = """
feed_var { name: "image" alias_name: "image" is_lod_tensor: false feed_type: 1 shape: 1 shape: 28 shape: 28 }
fetch_var { name: "logits" alias_name: "logits" is_lod_tensor: false fetch_type: 1 shape: 10 }
"""


def brpc_libraries(kind: str) -> dict[str, str]:
    """Return the variables with which its brpc client finds libraries that systems no longer have."""
    libraries = environment(kind) / "brpc"
    if not libraries.exists():
        pytest.skip(f"there is no compiler, or no shared libpython, for what the brpc client of {kind} needs")
    found: dict[str, str] = json.loads((libraries / "environ.json").read_text())
    return found


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


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_kserves_clients_get_answers(protocol: str, ports: dict[str, str], tmp_path: Path) -> None:
    """Health, answers to binary inputs and to JSON, and refusals that name what is wrong. They ask for no metadata."""
    found = run_client("kserve", "kserve_client.py", protocol, ports[protocol], cwd=tmp_path)
    assert found["ready"] == [True, True]
    assert found["models"] == [True, False]
    assert found["logits"] == [(IMAGE @ WEIGHTS).tolist()] * 2
    assert found["ids"] == ["seven"] * 2
    assert "served is" in found["refused"]["model"]
    assert "INT64" in found["refused"]["dtype"]
    assert "nothing" in found["refused"]["output"]


@pytest.mark.parametrize("how", [[], ["json"], ["gzip"], ["json", "gzip"], ["grpc"]], ids=" ".join)
def test_paddle_servings_http_client_gets_answers(how: list[str], ports: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "serving_client_conf.prototxt").write_text(CLIENT_CONFIG)
    numbers, shape = run_client("paddle-serving", "paddle_http_client.py", ports["paddle"], *how, cwd=tmp_path)
    assert np.array_equal(np.reshape(numbers, shape), IMAGE @ WEIGHTS)


def test_paddle_servings_brpc_client_gets_answers(ports: dict[str, str], tmp_path: Path) -> None:
    """By baidu_std."""
    (tmp_path / "serving_client_conf.prototxt").write_text(CLIENT_CONFIG)
    env = brpc_libraries("paddle-serving")
    numbers, shape = run_client("paddle-serving", "paddle_brpc_client.py", ports["paddle"], cwd=tmp_path, env=env)
    assert np.array_equal(np.reshape(numbers, shape), IMAGE @ WEIGHTS)


def test_students_of_edl_0_3_1_train_with_our_teachers(ports: dict[str, str], tmp_path: Path) -> None:
    """Its own DistillReader with Paddle Serving's client 0.3.2, in two epochs of three formats."""
    (tmp_path / "serving_conf").mkdir()
    (tmp_path / "serving_conf/serving_client_conf.prototxt").write_text(CLIENT_CONFIG)
    env = brpc_libraries("paddle-edl")
    found = run_client("paddle-edl", "paddle_edl_student.py", ports["paddle"], cwd=tmp_path, env=env)
    images = np.arange(20 * 784, dtype=np.float32).reshape(20, 784) % 11
    assert [[number for number, _ in epoch] for epoch in found] == [list(range(20))] * 6
    assert np.array_equal([[logits for _, logits in epoch] for epoch in found], [images @ WEIGHTS] * 6)
