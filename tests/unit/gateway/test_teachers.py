"""How much a teacher is asked at a time."""

from __future__ import annotations

from edl_runtime.gateway.teachers import MOST_PARTS, LlmTeacher
from edl_runtime.protocol.llm import LlmServer
from edl_runtime.registry.members import Member


def test_small_parts_do_not_take_a_connection_each_without_end() -> None:
    """Thousands of callers with a short sequence each wait in the gateway; a part of any size is sent alone."""
    server = LlmServer(kind="vllm", tokens_in_flight=1000)
    teacher = LlmTeacher(Member(id="1", address="vllm+http://127.0.0.1:1/net"), server)
    assert teacher.has_room(5000)
    teacher.parts, teacher.tokens = MOST_PARTS - 1, 500
    assert teacher.has_room(500)
    assert not teacher.has_room(501)
    teacher.parts = MOST_PARTS
    assert not teacher.has_room(1)
