"""`edl register`: keep a server that is not ours in a pool."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from edl_runtime.cli.options import read_settings, tell, tell_json_line
from edl_runtime.errors import SpecError
from edl_runtime.protocol.llm import KINDS, LOGPROBS_MODES, TOKENS_IN_FLIGHT
from edl_runtime.protocol.oip import TOKENIZER_FILES, ModelSignature
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    from edl_runtime.external.address import ServerAddress

_TENSOR = "NAME:DATATYPE:SIZE.SIZE…"


@click.command()
@click.option("--pool", default="", help="Pool to join; by default EDL_POOL.")
@click.option("--url", default="", help="The server: http, https, grpc or brpc://HOST:PORT.")
@click.option("--model", default="", help="Name of the model on that server.")
@click.option(
    "--protocol",
    type=click.Choice(["oip", "paddle-serving", "paddle-pipeline", *KINDS]),
    default="oip",
    show_default=True,
    help="What the server speaks.",
)
@click.option(
    "--inputs",
    multiple=True,
    metavar=_TENSOR,
    help="An input, as in image:FP32:-1.3.224.224, where the server does not tell; once for each. -1 is any size.",
)
@click.option("--outputs", multiple=True, metavar=_TENSOR, help="An output, likewise.")
@click.option("--max-batch", type=click.IntRange(min=1), help="Most rows of a request; by default what Triton tells.")
@click.option("--max-logprobs", type=click.IntRange(min=-1), help="Of a language model: vLLM's flag; -1 for any.")
@click.option(
    "--logprobs-mode", type=click.Choice(LOGPROBS_MODES), help="Likewise; by default vLLM's own, raw_logprobs."
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of a language model's tokenizer: a teacher with another one can't join. By default the server's, if "
    "it is here.",
)
@click.option(
    "--tokens-in-flight",
    type=click.IntRange(min=1),
    help=f"Most tokens that a language model is asked at a time; by default {TOKENS_IN_FLIGHT:,}.",
)
@click.option(
    "--server",
    "addresses",
    multiple=True,
    metavar="ADDRESS",
    help="A whole address, as in oip+http://triton:8000/MODEL, instead of --url and what describes it; once for each "
    "server.",
)
@click.option("--advertise", metavar="HOST", default="", help="Host at which students reach it; by default the URL's.")
@click.option(
    "--weight", type=float, default=1.0, show_default=True, help="Share of the pool's work, relative to others."
)
@click.option(
    "--drain-s",
    type=float,
    default=2.0,
    show_default=True,
    help="Seconds from leaving the pool to the end, in which students have their last answers.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that exists while all servers are in the pool, for a readiness probe.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address and what is served as one JSON object.")
def register(
    *,
    pool: str,
    url: str,
    model: str,
    protocol: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    max_batch: int | None,
    max_logprobs: int | None,
    logprobs_mode: str | None,
    tokenizer: Path | None,
    tokens_in_flight: int | None,
    addresses: tuple[str, ...],
    advertise: str,
    weight: float,
    drain_s: float,
    ready_file: Path | None,
    as_json: bool,
) -> None:
    """Bring servers that are not ours into a pool, each while its model is ready.

    Triton, KServe, MLServer and OpenVINO speak oip; Paddle Serving has two protocols of its own. vllm, sglang and swift
    (`swift deploy`) serve language models, which `edl gateway` asks. Runs beside the server
    until SIGTERM or Ctrl-C, then leaves the pool. Needs the registry in EDL_REDIS_URL. EDL_TEACHER_TOKEN is sent to the
    server as a bearer token.
    """
    from edl_runtime.external.address import ServerAddress, parse_tensor
    from edl_runtime.external.sidecar import RegisterOptions, keep_registered

    if ready_file:
        _remove_stale(ready_file)
    settings = read_settings()
    pool = check_name("--pool", pool or settings.pool)
    if bool(url) == bool(addresses) or bool(url) != bool(model):
        raise click.UsageError("Give --url and --model of one server, or --server for each of several.")
    servers = [ServerAddress.parse(address, "--server") for address in addresses]
    if url:
        scheme, _, endpoint = url.partition("://")
        server = ServerAddress(
            scheme=f"{protocol}+{scheme}",
            endpoint=endpoint.rstrip("/"),
            model=model,
            inputs=tuple(parse_tensor(one, "--inputs") for one in inputs),
            outputs=tuple(parse_tensor(one, "--outputs") for one in outputs),
            max_batch=max_batch,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode or "",
            tokens_in_flight=tokens_in_flight,
        )
        servers.append(_with_tokenizer(server, tokenizer) if tokenizer else server)
    options = RegisterOptions(pool=pool, servers=servers, advertise=advertise, weight=weight, drain_s=drain_s)
    joined: set[str] = set()

    def on_joined(address: str, signature: ModelSignature) -> None:
        joined.add(address)
        if ready_file and len(joined) == len(servers):
            ready_file.touch()
        if as_json:
            tell_json_line({"address": address, "pool": pool, "model": signature})
        else:
            tell(f"{address} is in pool {pool}")

    def on_left(address: str) -> None:
        joined.discard(address)
        if ready_file:
            ready_file.unlink(missing_ok=True)

    asyncio.run(keep_registered(options, settings, on_joined, on_left))


def _with_tokenizer(server: ServerAddress, folder: Path) -> ServerAddress:
    """Return the address with what the folder tells of the tokenizer. Raises SpecError without one."""
    from edl_runtime.external.llm import describe_tokenizer

    known = describe_tokenizer(folder)
    if not known.digest:
        raise SpecError("--tokenizer", str(folder), f"a folder with {' or '.join(TOKENIZER_FILES)}")
    return msgspec.structs.replace(server, tokenizer=known.digest, vocab_size=known.vocab_size)


def _remove_stale(ready_file: Path) -> None:
    """Remove the file of an earlier process, which may have been killed. Raises SpecError where none can be made."""
    allowed = "a file in a folder that this process may write to"
    try:
        ready_file.unlink(missing_ok=True)
    except OSError as error:
        raise SpecError("--ready-file", str(ready_file), f"{allowed}: {error.strerror}") from None
    if not os.access(ready_file.parent, os.W_OK):
        raise SpecError("--ready-file", str(ready_file), allowed)
