"""Addresses of servers that are not ours, in EDL_TEACHERS, `Fixed` and the registry in place of "host:port".

| address | server |
| --- | --- |
| `oip+http://HOST:PORT/MODEL` | Triton, KServe, MLServer, OpenVINO Model Server: the Open Inference Protocol v2 |
| `oip+grpc://HOST:PORT/MODEL` | the same over gRPC |
| `paddle-serving+brpc://HOST:PORT/NAME` | a server of Paddle Serving in C++; needs `input` and `output` |
| `paddle-serving+http://…`, `paddle-serving+grpc://…` | the same over HTTP and gRPC |
| `paddle-pipeline+http://HOST:PORT/NAME` | a Python pipeline of Paddle Serving; needs `input` and `output` |
| `paddle-pipeline+grpc://HOST:PORT/NAME` | the same over gRPC |
| `vllm+http://HOST:PORT/MODEL` | vLLM's server of a language model, of which `edl gateway` asks scores |
| `sglang+http://HOST:PORT/MODEL` | SGLang's |
| `swift+http://HOST:PORT/MODEL` | that of `swift deploy` |

With `s` behind the scheme (`oip+https`, `vllm+https`, `oip+grpcs`) through TLS. The query says what the server does
not:

| `?…&…` | |
| --- | --- |
| `input=NAME:DATATYPE:SIZE.SIZE…` | once for each input; the first size is the batch, -1 any size |
| `output=…` | an output |
| `max_batch=ROWS` | the most rows of a request |
| `max_logprobs=K`, `logprobs_mode=MODE` | of a language model: vLLM's flags of these names |
| `tokenizer=DIGEST`, `vocab_size=N` | of its tokenizer, as `edl register --tokenizer` finds them |
| `tokens_in_flight=N` | the most tokens that it is asked at a time |
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.llm import KINDS, LOGPROBS_MODES, Kind
from edl_runtime.protocol.oip import TensorSpec

SCHEMES = (
    *("oip+http", "oip+https", "oip+grpc", "oip+grpcs"),
    *("paddle-serving+brpc", "paddle-serving+http", "paddle-serving+grpc"),
    *("paddle-pipeline+http", "paddle-pipeline+grpc"),
    *(f"{kind}+{carrier}" for kind in KINDS for carrier in ("http", "https")),
)

_NUMBERS = {"max_batch": 1, "max_logprobs": -1, "vocab_size": 1, "tokens_in_flight": 1}
"""The numbers of a query, and the least that each may be."""
_WORDS = ("logprobs_mode", "tokenizer")


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a server that is not ours; `str()` is its address. The fields are those of the table above."""

    scheme: str
    endpoint: str
    model: str
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    max_batch: int | None = None
    max_logprobs: int | None = None
    logprobs_mode: str = ""
    tokenizer: str = ""
    vocab_size: int | None = None
    tokens_in_flight: int | None = None

    def __post_init__(self) -> None:
        """Raise SpecError for what is no address."""
        _check_no_user("server", self.endpoint)
        if self.scheme not in SCHEMES:
            raise SpecError("scheme", self.scheme, ", ".join(SCHEMES))
        endpoint_of(self.endpoint, "server")
        if not self.model:
            raise SpecError("model", self.model, "the name of a model on the server")
        for name, least in _NUMBERS.items():
            given = getattr(self, name)
            if given is not None and given < least:
                raise SpecError(name, given, f"{least} or more")
        if self.logprobs_mode not in ("", *LOGPROBS_MODES):
            raise SpecError("logprobs_mode", self.logprobs_mode, " or ".join(LOGPROBS_MODES))

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
        numbers = {name: query.pop(name)[-1] for name in _NUMBERS if name in query}
        words = {name: query.pop(name)[-1] for name in _WORDS if name in query}
        tensors = {
            f"{kind}s": tuple(parse_tensor(one, f"{field}: {kind}") for one in query.pop(kind, ()))
            for kind in ("input", "output")
        }
        wrong = [name for name, number in numbers.items() if not re.fullmatch(r"-?\d{1,9}", number, re.ASCII)]
        if query or url.fragment or wrong:
            allowed = f"behind the ?: input, output, {', '.join(_WORDS)}, and with a number {', '.join(_NUMBERS)}"
            raise SpecError(field, text, allowed)
        given: dict[str, Any] = {name: int(number) for name, number in numbers.items()} | words | tensors
        model = unquote(url.path.removeprefix("/").removesuffix("/"))
        return cls(scheme=url.scheme, endpoint=url.netloc, model=model, **given)

    def reached_at(self, host: str) -> Self:
        """Return the address by which others reach it, at `host` instead of the one here; empty for the same one."""
        _, port = endpoint_of(self.endpoint)
        host = f"[{host}]" if ":" in host else host
        return msgspec.structs.replace(self, endpoint=f"{host}:{port}") if host else self

    @property
    def llm(self) -> Kind | None:
        """Whose protocol a server of a language model speaks; None for one of tensors."""
        protocol = self.scheme.partition("+")[0]
        return next((kind for kind in KINDS if kind == protocol), None)

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
            *((name, getattr(self, name)) for name in (*_NUMBERS, *_WORDS) if getattr(self, name) not in (None, "")),
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
