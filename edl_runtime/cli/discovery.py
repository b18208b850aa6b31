"""`edl discovery`: HTTP discovery for students without access to Redis."""

from __future__ import annotations

import asyncio

import click
import msgspec

from edl_runtime.cli.options import read_settings, tell
from edl_runtime.errors import SpecError


@click.command
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; off loopback only with a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; by default a free one.")
@click.option("--json", "as_json", is_flag=True, help="Print the URL as a JSON object.")
def discovery(*, host: str, port: int, as_json: bool) -> None:
    """Serve the registry in EDL_REDIS_URL over HTTP until SIGTERM or Ctrl-C.

    Students with its URL in EDL_DISCOVERY_URL need no Redis. GET /v1/pools and /v1/pools/NAME return what `edl pools`
    shows. EDL_DISCOVERY_TOKEN is the token of clients; EDL_TLS_CERT and EDL_TLS_KEY enable HTTPS.
    """
    try:
        from edl_runtime.discovery.server import serve
    except ModuleNotFoundError as error:
        raise SpecError("edl discovery", f"no module {error.name}", "the extra edl-airflow[discovery]") from None

    def on_ready(url: str) -> None:
        tell(msgspec.json.encode({"url": url}) if as_json else f"discovery ready on {url}")

    asyncio.run(serve(host, port, read_settings(), on_ready))
