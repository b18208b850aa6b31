"""Addresses of servers that are not ours."""

from __future__ import annotations

import pytest
from support.external_servers import DECLARED

from edl_runtime.distill.teacher_addresses import Fixed
from edl_runtime.errors import SpecError
from edl_runtime.external.address import SCHEMES, ServerAddress, is_external, parse_tensor
from edl_runtime.external.sidecar import RegisterOptions
from edl_runtime.protocol.oip import TensorSpec


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_address_is_read_as_it_is_written(scheme: str) -> None:
    """Names with any letters, and several tensors."""
    address = ServerAddress(
        scheme=scheme,
        endpoint="[::1]:8000",
        model="a/b ?&#",
        inputs=(TensorSpec("x:0", "FP32", (-1, 3)), TensorSpec("mask,&=", "INT64", (-1,))),
        outputs=(TensorSpec("y", "FP16", (4, 2)),),
        max_batch=32,
    )
    assert ServerAddress.parse(str(address)) == address
    assert is_external(str(address))
    assert Fixed.parse(f"{address},127.0.0.1:9000").addresses == (str(address), "127.0.0.1:9000")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("oip+http://127.0.0.1/net", "127.0.0.1"),
        ("oip+http://127.0.0.1:8000", "model"),
        ("oip+http://127.0.0.1:8000/net?max_batch=0", "max_batch"),
        ("oip+http://127.0.0.1:8000/net?max_batch=many", "max_batch"),
        ("oip+http://127.0.0.1:8000/net?batch=1", "behind the ?"),
        ("oip+http://127.0.0.1:8000/net?input=image", "input"),
        ("oip+http://127.0.0.1:8000/net?input=image:FLOAT:1", "NAME:DATATYPE"),
        ("oip+http://127.0.0.1:8000/net#there", "behind the ?"),
        (f"oip+http://127.0.0.1:8000/net?max_batch={'9' * 5000}", "max_batch"),
        (f"oip+http://127.0.0.1:{'9' * 5000}/net", "host:port"),
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(SpecError, match=named.replace("?", r"\?")):
        Fixed((text,))


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    """Addresses are logged, and kept in Redis."""
    for refused in (lambda: Fixed(("oip+http://me:secret@127.0.0.1:8000/net",)), lambda: server("me:secret@host:80")):
        with pytest.raises(SpecError, match="EDL_TEACHER_TOKEN") as caught:
            refused()
        assert "secret" not in str(caught.value)


def server(endpoint: str) -> ServerAddress:
    return ServerAddress(scheme="oip+http", endpoint=endpoint, model="net")


def test_another_scheme_is_no_address() -> None:
    assert not is_external("http://127.0.0.1:8000/net")
    with pytest.raises(SpecError, match="host:port"):
        Fixed(("http://127.0.0.1:8000/net",))


@pytest.mark.parametrize(
    ("first", "second", "advertise"),
    [
        ("oip+http://triton:8000/net", "oip+http://TRITON:08000/net/", ""),
        ("oip+http://triton:8000/net", "oip+grpc://triton:8000/net?max_batch=4", ""),
        ("oip+http://[::1]:8000/a%20b", "oip+http://[0:0:0:0:0:0:0:1]:8000/a b", ""),
        (f"paddle-serving+brpc://p:9292/a{DECLARED}", f"paddle-serving+http://p:9292/b{DECLARED}", ""),
        ("oip+http://one:8000/net", "oip+http://two:8000/net", "pod"),
    ],
)
def test_a_server_that_is_given_twice_is_refused_with_both_names(first: str, second: str, advertise: str) -> None:
    """However it is spelled, and also when others would reach both at one address."""
    servers = (ServerAddress.parse(first), ServerAddress.parse(second))
    with pytest.raises(SpecError, match="these two are the same") as refused:
        RegisterOptions(pool="images", servers=servers, advertise=advertise)
    assert f"{servers[0]} and {servers[1]}" in str(refused.value)


def test_other_models_and_other_ports_are_other_servers() -> None:
    texts = ("oip+http://t:8000/a", "oip+http://t:8000/b", "oip+http://t:8001/a", "paddle-pipeline+http://t:8000/a")
    RegisterOptions(pool="images", servers=tuple(map(ServerAddress.parse, texts)))


def test_others_reach_a_server_at_another_host() -> None:
    address = ServerAddress.parse("oip+grpc://127.0.0.1:8001/net")
    assert address.reached_at("") == address
    assert str(address.reached_at("fd00::7")) == "oip+grpc://[fd00::7]:8001/net"


def test_a_tensors_name_may_have_colons() -> None:
    assert parse_tensor("x:0:FP32:-1.2", "--inputs") == TensorSpec("x:0", "FP32", (-1, 2))


def test_a_tensor_may_have_the_name_of_an_option() -> None:
    address = ServerAddress.parse("oip+http://127.0.0.1:8000/net?input=max_batch:FP32:-1")
    assert address.max_batch is None
