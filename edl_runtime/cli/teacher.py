"""`edl teacher`: serve a model to students."""

from __future__ import annotations

import asyncio

import click

from edl_runtime.cli.options import parse_gpu_ids, read_settings, split_list, tell, tell_json_line
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.specs import HUNG_AFTER_S, MAX_BATCH, check_name


@click.command()
@click.option(
    "--model", required=True, help="Folder of a Paddle inference model, .onnx file, or package.module:function."
)
@click.option("--pool", default="", help="Pool to join; by default EDL_POOL, and none without it.")
@click.option(
    "--host", default="", help="Address to bind; by default EDL_HOST, else 127.0.0.1. Off loopback with a token."
)
@click.option("--advertise", metavar="HOST", default="", help="Host at which students reach it; by default --host.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; by default EDL_PORT, else a free one.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    help="Port for the Open Inference Protocol over gRPC as well; 0 for a free one. By default there is none.",
)
@click.option(
    "--paddle-port",
    type=click.IntRange(0, 65535),
    help="Port for clients of Paddle Serving (HTTP, gRPC and brpc); 0 for a free one. By default there is none.",
)
@click.option("--name", default="teacher", show_default=True, help="Name of the served model.")
@click.option("--outputs", default="", help="Outputs to serve, as in logits=fetch_name_0,hidden; by default all.")
@click.option("--gpu-ids", default="", help="GPUs to run on, as in 0,1; by default the CPU.")
@click.option(
    "--mem-optim",
    type=bool,
    is_flag=False,
    flag_value=True,
    default=False,
    help="Let Paddle reuse memory between layers; alone, or with True or False.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=MAX_BATCH,
    show_default=True,
    help="Most rows of a batch that waiting requests are joined to; 1 for a model whose answer for a row depends on "
    "the other rows.",
)
@click.option(
    "--weight", type=float, default=1.0, show_default=True, help="Share of the pool's work, relative to others."
)
@click.option(
    "--hung-after",
    type=float,
    default=HUNG_AFTER_S,
    show_default=True,
    help="Seconds. A predictor that takes longer for one run counts as hung: the teacher exits with 1.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address and what is served as one JSON object.")
def teacher(
    *,
    model: str,
    pool: str,
    host: str,
    advertise: str,
    port: int,
    grpc_port: int | None,
    paddle_port: int | None,
    name: str,
    outputs: str,
    gpu_ids: str,
    mem_optim: bool,
    max_batch: int,
    weight: float,
    hung_after: float,
    as_json: bool,
) -> None:
    """Serve a model over the Open Inference Protocol v2 until SIGTERM, Ctrl-C or `edl drain`, then drain.

    With a pool, students find it through the registry in EDL_REDIS_URL. EDL_TEACHER_TOKEN is the token of clients; with
    EDL_TLS_CERT and EDL_TLS_KEY it serves TLS only.
    """
    from edl_runtime.teacher.models.model import ModelOptions
    from edl_runtime.teacher.service import TeacherOptions, serve

    settings = read_settings()
    pool = pool or settings.pool
    options = TeacherOptions(
        model=ModelOptions(
            model=model, name=name, outputs=split_list(outputs), mem_optim=mem_optim, max_batch=max_batch
        ),
        gpu_ids=parse_gpu_ids(gpu_ids),
        host=host or settings.host,
        advertise=advertise,
        port=port or settings.port,
        grpc_port=grpc_port,
        paddle_port=paddle_port,
        pool=check_name("pool", pool) if pool else "",
        weight=weight,
        hung_after_s=hung_after,
    )

    def on_ready(address: str, signature: ModelSignature) -> None:
        if as_json:
            tell_json_line({"address": address, "pool": options.pool, "model": signature})
        else:
            tell(f"teacher ready on {address}, serving {model}")

    asyncio.run(serve(options, settings, on_ready))
