"""What passes, commands and followers cost with many jobs, on a real API server with kwok's fake nodes and pods.

    make kwok
    KUBECONFIG=… python benchmarks/scale.py --jobs 1000 --json

The cluster that KUBECONFIG names gets as many fake nodes as jobs, trainings of 4 pods, a fifth as many pools of 5 pods,
and a private Redis ten times as many registered teachers; all of it is removed in the end. Needs some GB of memory and,
with 1,000 jobs, minutes. A pass has to give one instance more to each fifth training.

Each line runs in a process of its own, and `cpu_s` is that process's alone: the API server shares the cores. Fake nodes
serve no logs, so those are asked for again and again, and counted apart. The deferred tasks whose triggerer is killed
are in a real Airflow's database, which needs no scheduler for that. Must: see `LIMITS`. Exit status 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from _flags import at_least_1
from _scale_lines import LINES, Figure
from _scale_world import KWOK, Size, shrink, world

from edl_runtime.store.redis_server import RedisServer

LIMITS: dict[str, dict[str, float]] = {
    "a pass with changes": {"wall_s": 5.0},
    "a pass with nothing to do": {"requests": 2, "decide_ms": 100},
    "edl jobs": {"wall_s": 2.0},
    "edl monitor, next look": {"wall_s": 1.0},
    "a triggerer, first look": {"wall_s": 30.0},
    "a triggerer, later": {
        "requests_per_min": 5,
        "rss_mb": 300,
        "core_share": 0.2,
    },
    "a triggerer, after a death": {"wall_s": 30.0},
    **{
        f"{verb} a {kind}": {"wall_s": 1.0, "requests": 10}
        for verb in ("submit", "resize")
        for kind in ("trainer", "pool")
    },
    **{f"stop a {kind}": {"but_logs": 10} for kind in ("trainer", "pool")},
}
"""The most that each line may take, by figure. A stop takes as long as the last pod does, and reads each pod's log."""


def values(figure: Figure) -> dict[str, float]:
    """Return all that was measured of a line."""
    return {
        "wall_s": figure.wall_s,
        "cpu_s": figure.cpu_s,
        "requests": sum(figure.requests.values()),
        "but_logs": sum(count for verb, count in figure.requests.items() if verb != "LOG"),
        "read_mb": figure.read_mb,
        "rss_mb": figure.rss_mb,
        **figure.extra,
    }


def missed(figure: Figure) -> list[str]:
    """Return which limits a line exceeds, in words."""
    found, limits = values(figure), {"exit_status": 0, **LIMITS.get(figure.name, {})}
    return [f"{name} {found[name]:.3g} > {most:g}" for name, most in limits.items() if found.get(name, 0) > most]


async def measure(size: Size, lines: Sequence[str], redis_url: str, folder: Path) -> list[Figure]:
    """Make the world and measure the lines one after the other."""
    found: list[Figure] = []
    async with world(size, folder, redis_url) as namespace:
        cluster = {"conn_type": "kubernetes", "extra": {"kube_config_path": os.environ["KUBECONFIG"]}}
        environ = {
            **os.environ,
            "EDL_BACKEND": "kubernetes",
            "EDL_KUBE_NAMESPACE": namespace,
            "EDL_NAMESPACE": namespace,
            "EDL_REDIS_URL": redis_url,
            "EDL_SCALE_JOBS": str(size.jobs),
            "AIRFLOW_HOME": str(folder / "airflow"),
            "AIRFLOW_CONN_CLUSTER": json.dumps(cluster),
        }
        for line in lines:
            if line == "idle_pass" and "first_pass" not in lines:
                await _run("first_pass", environ)
            measured = await _run(line, environ)
            found += measured
            for one in measured:
                show(one)
            if line == "first_pass" and "idle_pass" not in lines:
                await shrink(namespace, size)
    return found


async def _run(line: str, environ: dict[str, str]) -> list[Figure]:
    script = Path(__file__).with_name("_scale_lines.py")
    process = await asyncio.create_subprocess_exec(sys.executable, script, line, env=environ, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        return [Figure(name=line, extra={"exit_status": process.returncode})]
    return msgspec.json.decode(output.splitlines()[-1], type=list[Figure])


def show(figure: Figure) -> None:
    """Print a line of the table at once."""
    verbs = ", ".join(f"{count} {verb}" for verb, count in sorted(figure.requests.items()))
    numbers = "  ".join(f"{name} {value:,.3g}" for name, value in values(figure).items())
    outcome = "MISSED: " + "; ".join(missed(figure)) if missed(figure) else "ok" if figure.name in LIMITS else ""
    print(f"{figure.name:26} {numbers}  [{verbs}]  {outcome}", flush=True)


def main() -> None:
    """Measure, print, and exit with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", type=at_least_1, default=100, help="trainings; nodes, pools and teachers go with them"
    )
    parser.add_argument("--line", choices=LINES, action="append", help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    if not KWOK.exists():
        parser.error(f"there is no {KWOK}; `make kwok` builds it")
    if not os.environ.get("KUBECONFIG"):
        parser.error("set KUBECONFIG to the cluster that gets the fake nodes, for tests alone")
    jobs = options.jobs
    size = Size(jobs=jobs, nodes=jobs, pools=max(1, jobs // 5), teachers=jobs * 10)
    print(f"{size.nodes} nodes, {size.jobs} trainings, {size.pools} pools, {size.pods} pods, {size.teachers} teachers")
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "redis") as redis:
        found = asyncio.run(measure(size, options.line or list(LINES), redis.url, Path(folder)))
    if options.json:
        print(json.dumps({one.name: {**values(one), "missed": missed(one)} for one in found}))
    if any(map(missed, found)):
        sys.exit(1)


if __name__ == "__main__":
    main()
