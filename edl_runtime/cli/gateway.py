"""`edl gateway`: one URL for each pool of language models."""

from __future__ import annotations

import asyncio

import click
import msgspec

from edl_runtime.cli.options import read_settings, tell
from edl_runtime.errors import SpecError


@click.command
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; off loopback only with a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; by default a free one.")
@click.option(
    "--wait-s",
    type=float,
    default=240.0,
    show_default=True,
    help="How long a request waits while its pool has no good teacher; then it is answered 503.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the URL as a JSON object.")
def gateway(*, host: str, port: int, wait_s: float, as_json: bool) -> None:
    """Serve pools of language models, which `edl register` fills, until SIGTERM or Ctrl-C.

    Trainers that distil from a vLLM, SGLang, TRL or ms-swift server have http://HOST:PORT/pools/NAME in its place.
    Needs the registry in EDL_REDIS_URL. EDL_GATEWAY_TOKEN is the token of clients: a bearer token, or the password in
    their URL, as in http://edl:TOKEN@HOST:PORT/pools/NAME. EDL_TEACHER_TOKEN is sent to teachers; EDL_TLS_CERT and
    EDL_TLS_KEY enable HTTPS.
    """
    try:
        from edl_runtime.gateway.server import serve
    except ModuleNotFoundError as error:
        raise SpecError("edl gateway", f"no module {error.name}", "the extra edl-airflow[discovery]") from None

    def on_ready(url: str) -> None:
        tell(msgspec.json.encode({"url": url}) if as_json else f"gateway ready on {url}")

    settings = read_settings(redis="the Redis that pools register in")
    asyncio.run(serve(host, port, settings, on_ready, wait_s=wait_s))
