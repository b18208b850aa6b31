"""`edl controller`: serves the `TrainingJob` objects of a cluster."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

import click
import msgspec

from edl_runtime.autoscale.policy.decide import STARVATION_S, decide
from edl_runtime.autoscale.traffic.capacity import LEAD_S
from edl_runtime.cli.autoscale import Changes, max_load_option, named_policy, policy_option
from edl_runtime.cli.backends import kubernetes_place
from edl_runtime.cli.options import read_settings, tell, tell_json_line
from edl_runtime.compat.job_specs import checkpoints_of_pods, redis_of_pods
from edl_runtime.concurrency import event_of_termination, first_completed
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from edl_runtime.controller.vitals import Vitals


@click.command
@click.option("--all-namespaces", is_flag=True, help="Serve all namespaces of the cluster, not only one.")
@click.option(
    "--windows-configmap",
    default="",
    metavar="NAME",
    help="The ConfigMap whose key windows.yaml has the traffic windows; none by default.",
)
@max_load_option
@policy_option
@click.option(
    "--interval",
    "interval_s",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest time between two rescalings.",
)
@click.option("--rescale/--no-rescale", default=True, show_default=True, help="Whether to rescale jobs and pools.")
@click.option(
    "--checkpoint", default="", metavar="URL", help="Where checkpoints are kept, in a folder of each job's name."
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of --port. Off loopback metrics need the bearer token EDL_MONITOR_TOKEN; without one there is only "
    "health.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port for health and metrics over HTTP; 0 for a free one. By default there is none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each rescaling.")
def controller(
    *,
    all_namespaces: bool,
    windows_configmap: str,
    max_load: float,
    policy_name: str | None,
    interval_s: float,
    rescale: bool,
    checkpoint: str,
    host: str,
    port: int | None,
    as_json: bool,
) -> None:
    """Start and rescale the trainings of TrainingJob objects, until SIGTERM.

    Serves the namespace of the kubeconfig or of its own pod, or EDL_KUBE_NAMESPACE. Of several controllers one leads,
    and another takes over when it ends. Jobs that others have started are rescaled too.

    GET /v1/health/live of --port answers while it runs, /v1/health/ready once the API server and Redis answer and the
    traffic windows are valid, /metrics for Prometheus.

    Needs EDL_REDIS_URL; if pods reach that Redis at another address, set EDL_REDIS_FOR_PODS to it, as host:port.
    EDL_CHECKPOINT is the default of --checkpoint.
    """
    settings = read_settings(redis="the Redis of the trainers")
    if not 0 < interval_s < STARVATION_S - LEAD_S:
        raise SpecError("--interval", interval_s, f"seconds above 0, less than {STARVATION_S - LEAD_S:g}")
    from edl_runtime.controller.controller import JobDefaults
    from edl_runtime.controller.passes import PassOptions
    from edl_runtime.controller.run import ControllerOptions, run_controller, wait_for_trainings_to_end
    from edl_runtime.controller.vitals import Vitals

    connect, namespace = kubernetes_place(settings)
    passes = PassOptions(
        interval_s=interval_s,
        max_load=max_load,
        policy=named_policy(policy_name) if policy_name is not None else decide,
        show=tell_json_line if as_json else Changes().show,
    )
    defaults = JobDefaults(
        settings=msgspec.structs.replace(settings, backend="kubernetes"),
        redis_url=redis_of_pods(settings),
        checkpoints=checkpoints_of_pods(checkpoint or settings.checkpoint),
    )
    options = ControllerOptions(
        namespace=namespace,
        defaults=defaults,
        all_namespaces=all_namespaces,
        windows_configmap=windows_configmap,
        passes=passes if rescale else None,
    )

    async def run() -> None:
        stop = event_of_termination()
        vitals = Vitals()

        async def stopped() -> None:
            await stop.wait()
            await wait_for_trainings_to_end(connect, namespace)

        async with AsyncExitStack() as served:
            if port is not None:
                url = await served.enter_async_context(_serving(host, port, vitals, settings))
                tell(f"edl: health and metrics at {url}", err=True)
            await first_completed(stopped(), run_controller(connect, options, vitals))

    asyncio.run(run())


def _serving(host: str, port: int, vitals: Vitals, settings: RuntimeSettings) -> AbstractAsyncContextManager[str]:
    try:
        from edl_runtime.controller.server import serving_vitals
    except ModuleNotFoundError as error:
        raise SpecError("--port", f"without module {error.name}", "with the extra edl-airflow[discovery]") from None
    return serving_vitals(host, port, vitals, settings)
