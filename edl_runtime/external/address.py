"""Addresses of servers that are not ours, in EDL_TEACHERS, `Fixed` and the registry in place of "host:port".

| address | server |
| --- | --- |
| `oip+http://HOST:PORT/MODEL` | Triton, KServe, MLServer, OpenVINO Model Server: the Open Inference Protocol v2 |
| `oip+grpc://HOST:PORT/MODEL` | the same over gRPC |
| `paddle-serving+brpc://HOST:PORT/NAME` | a server of Paddle Serving in C++; needs `input` and `output` |
| `paddle-serving+http://…`, `paddle-serving+grpc://…` | the same over HTTP and gRPC |
| `paddle-pipeline+http://HOST:PORT/NAME` | a Python pipeline of Paddle Serving; needs `input` and `output` |
| `paddle-pipeline+grpc://HOST:PORT/NAME` | the same over gRPC |

With `s` behind the scheme (`oip+https`, `oip+grpcs`) through TLS. The query says what the server does not:

| `?…&…` | |
| --- | --- |
| `input=NAME:DATATYPE:SIZE.SIZE…` | once for each input; the first size is the batch, -1 any size |
| `output=…` | an output |
| `max_batch=ROWS` | the most rows of a request |
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Self
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.oip import TensorSpec

SCHEMES = (
    *("oip+http", "oip+https", "oip+grpc", "oip+grpcs"),
    *("paddle-serving+brpc", "paddle-serving+http", "paddle-serving+grpc"),
    *("paddle-pipeline+http", "paddle-pipeline+grpc"),
)


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a server that is not ours; `str()` is its address. The fields are those of the table above."""

    scheme: str
    endpoint: str
    model: str
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    max_batch: int | None = None

    def __post_init__(self) -> None:
        """Raise SpecError for what is no address."""
        _check_no_user("server", self.endpoint)
        if self.scheme not in SCHEMES:
            raise SpecError("scheme", self.scheme, ", ".join(SCHEMES))
        endpoint_of(self.endpoint, "server")
        if not self.model:
            raise SpecError("model", self.model, "the name of a model on the server")
        if self.max_batch is not None and self.max_batch < 1:
            raise SpecError("max_batch", self.max_batch, "1 or more rows")

    @classmethod
    def parse(cls, text: str, field: str = "teacher address") -> Self:
        """Read an address. Raises SpecError that names `field`."""
        try:
            url = urlsplit(text)
        except ValueError as error:
            raise SpecError(field, text, f"a URL: {error}") from None
        _check_no_user(field, url.netloc)
        if url.scheme not in SCHEMES:
            raise SpecError(field, text, f"an address as in oip+http://HOST:PORT/MODEL, by one of {', '.join(SCHEMES)}")
        query = parse_qs(url.query, keep_blank_values=True)
        rows = query.pop("max_batch", [None])[-1]
        tensors = {
            f"{kind}s": tuple(parse_tensor(one, f"{field}: {kind}") for one in query.pop(kind, ()))
            for kind in ("input", "output")
        }
        if query or url.fragment or not (rows is None or re.fullmatch(r"\d{1,9}", rows, re.ASCII)):
            allowed = "behind the ?: input, output and max_batch, a number"
            raise SpecError(field, text, allowed)
        return cls(
            scheme=url.scheme,
            endpoint=url.netloc,
            model=unquote(url.path.removeprefix("/").removesuffix("/")),
            max_batch=None if rows is None else int(rows),
            **tensors,
        )

    def reached_at(self, host: str) -> Self:
        """Return the address by which others reach it, at `host` instead of the one here; empty for the same one."""
        _, port = endpoint_of(self.endpoint)
        host = f"[{host}]" if ":" in host else host
        return msgspec.structs.replace(self, endpoint=f"{host}:{port}") if host else self

    @property
    def identity(self) -> tuple[str, str, int, str]:
        """What two addresses of one model on one server share, however they are spelled.

        Paddle Serving answers all carriers on one port, whatever the model's name.
        """
        protocol = self.scheme.partition("+")[0]
        host, port = endpoint_of(self.endpoint)
        try:
            host = str(ipaddress.ip_address(host))
        except ValueError:
            host = host.lower()
        return protocol, host, port, "" if protocol == "paddle-serving" else self.model

    def __str__(self) -> str:
        query = [
            *(("input", _tensor_text(one)) for one in self.inputs),
            *(("output", _tensor_text(one)) for one in self.outputs),
            *([("max_batch", self.max_batch)] if self.max_batch else []),
        ]
        more = f"?{urlencode(query, safe=':')}" if query else ""
        return f"{self.scheme}://{self.endpoint}/{quote(self.model, safe='')}{more}"


def check_distinct(servers: Iterable[ServerAddress], field: str, advertise: str = "") -> None:
    """Raise SpecError, which names `field` and both, for two addresses of one model on one server.

    Others reach the servers at the host `advertise`; empty for their own.
    """
    known: dict[tuple[str, str, int, str], ServerAddress] = {}
    for server in servers:
        if (first := known.setdefault(server.reached_at(advertise).identity, server)) is not server:
            raise SpecError(field, f"{first} and {server}", "each server once: these two are the same")


def _check_no_user(field: str, address: str) -> None:
    """Raise SpecError, which does not repeat it, for an address with a password: addresses are logged and kept."""
    if "@" in address:
        raise SpecError(
            field, "an address with user or password", "one without; EDL_TEACHER_TOKEN is sent to the server"
        )


def is_external(address: str) -> bool:
    """Whether it is the address of a server that is not ours."""
    return address.partition("://")[0] in SCHEMES


def parse_tensor(text: str, field: str) -> TensorSpec:
    """Read "NAME:DATATYPE:SIZE.SIZE…". Raises SpecError that names `field`."""
    name, *more = text.rsplit(":", 2)
    try:
        datatype, sizes = more
        shape = [int(size) for size in sizes.split(".")]
        return msgspec.convert({"name": name, "datatype": datatype, "shape": shape}, TensorSpec)
    except (ValueError, msgspec.ValidationError):
        raise SpecError(field, text, "NAME:DATATYPE:SIZE.SIZE…, as in image:FP32:-1.3.224.224") from None


def _tensor_text(tensor: TensorSpec) -> str:
    return f"{tensor.name}:{tensor.datatype}:{'.'.join(map(str, tensor.shape))}"
