"""How the pauses of an elastic training, and its traffic at Redis, grow with its instances.

    python benchmarks/elastic_scale.py --sizes 4 16 64 --repeat 3 --json

Real agents, groups and sockets, and a Redis of its own; the workers use numpy, because 64 with Paddle would need 20 GB.
For each size one instance leaves (SIGTERM) and joins again, so often; a pause is as in `resize.py`: from the last
step before the change until all ranks have done one after it. Commands are those that clients send: a second while
nothing happens, and the most in any second from a change until the group is as large as it shall be. CPU seconds are
those of a second in which nothing happens.

Exits with 1 when a median pause is longer than three times that of the smallest group, or when there are more than 200
commands in a second, with or without a change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from _elastic_jobs import HERE, NAME, Group, Load, ProcessJob
from _elastic_pauses import Log, Resumed, faults, pause_s, resumed
from _flags import at_least_1
from redis_use import sent_by_clients

from edl_runtime.cli.options import print_table
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_server import RedisServer

LONGEST_PAUSE = 3.0
MOST_COMMANDS_PER_S = 200
SETTLED_STEPS = 10
PATIENCE_S = 300.0
SAMPLE_EVERY_S = 0.2
LOOK_EVERY_S = 0.5
"""How often the steps are read: that takes some processor time from the trainers."""
COUNTED_S = 3.0
"""For so long at least commands are counted after a change."""


class LightJob(ProcessJob):
    """Agents of one job whose workers have no Paddle."""

    def __init__(self, folder: Path, url: str, size: int, step_ms: int) -> None:
        without = folder / "modules"
        without.mkdir()
        (without / "paddle.py").write_text('raise ImportError("not in this benchmark")\n')  # agents preload it
        settings = RuntimeSettings(redis_url=url, job=NAME)
        script = ["python", str(HERE / "_elastic_light.py"), *Load(1, step_ms, busy=False).arguments(folder)]
        bounds = f"{size - 1}:{size}"
        agent = [sys.executable, "-m", "edl_runtime.cli", "agent", "--instances", bounds, "--", *script]
        super().__init__(
            folder,
            lambda _: agent,
            lambda instance: {
                **msgspec.structs.replace(settings, instance=instance).to_env(),
                "PYTHONPATH": os.pathsep.join([str(without), *filter(None, [os.environ.get("PYTHONPATH")])]),
            },
        )
        self.group = Group(url, settings.namespace, "live")
        self.size = size
        self._used_s: dict[psutil.Process, float] = {}

    def ready(self) -> int:
        """Return how many instances are ready to train."""
        return sum(member.ready for member in self.group.members()) if self.group else 0

    def cpu_s(self) -> float:
        """CPU seconds of all processes so far."""
        self._record_processes()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                self._used_s[process] = used.user + used.system
        return sum(self._used_s.values())


class CommandCounter:
    """Counts the commands that clients send to a Redis, a few times a second, until it is closed."""

    def __init__(self, url: str) -> None:
        from redis import Redis

        self._redis: Any = Redis.from_url(url, decode_responses=True)
        self._samples: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._redis.close()

    def most_per_s(self, begin: float, end: float) -> float:
        """Return the most in about a second of that time."""
        samples = [sample for sample in self._samples if begin <= sample[0] <= end]
        width = round(1 / SAMPLE_EVERY_S)
        rates = [self._rate(*pair) for pair in zip(samples, samples[width:], strict=False)]
        return max(rates, default=self._rate(samples[0], samples[-1]))

    def per_s(self, begin: float, end: float) -> float:
        """Return the commands a second."""
        samples = [sample for sample in self._samples if begin <= sample[0] <= end]
        return self._rate(samples[0], samples[-1])

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_EVERY_S):
            self._samples.append((time.time(), sent_by_clients(self._redis.info("commandstats"))))

    @staticmethod
    def _rate(first: tuple[float, int], last: tuple[float, int]) -> float:
        return round((last[1] - first[1]) / max(last[0] - first[0], SAMPLE_EVERY_S), 1)


class Scale:
    """Changes one job and measures that."""

    def __init__(self, job: LightJob, redis: psutil.Process, counter: CommandCounter) -> None:
        self._job = job
        self._redis = redis
        self._counter = counter
        self._log = Log(job.folder)

    def begin(self, at_once: int) -> None:
        """Start all instances, so many at a time."""
        for instance in range(self._job.size):
            self._job.start(instance)
            if instance % at_once == at_once - 1:
                self._await(lambda started=instance + 1: self._job.ready() >= started)
        self.settle(self._job.size)

    def settle(self, size: int) -> Resumed:
        """Wait until so many instances have trained for a while; return their generation."""

        def settled() -> Resumed | None:
            steps = self._log.steps()
            found = resumed(steps)
            if not found or len(found[-1].instances) != size or not self._job.settled():
                return None
            done = sum(step.generation == found[-1].generation and step.rank == 0 for step in steps)
            return found[-1] if done >= SETTLED_STEPS else None

        return self._await(settled)

    def steady(self, seconds: float) -> dict[str, float]:
        """Return the commands and the CPU seconds of one second in which nothing changes."""
        began, agents, redis = time.time(), self._job.cpu_s(), self._redis_cpu_s()
        time.sleep(seconds)
        took_s = time.time() - began
        return {
            "commands_per_s": self._counter.per_s(began, began + took_s),
            "cpu_s": round((self._job.cpu_s() - agents) / took_s, 2),
            "redis_cpu_s": round((self._redis_cpu_s() - redis) / took_s, 3),
        }

    def change(self, case: str, instance: int) -> dict[str, Any]:
        """Have this instance leave or join; return the pause, and the most commands in a second meanwhile."""
        before = self.settle(self._job.size - (case == "join"))
        began, agents, redis = time.time(), self._job.cpu_s(), self._redis_cpu_s()
        (self._job.start if case == "join" else self._job.terminate)(instance)
        size = len(before.instances) + (1 if case == "join" else -1)
        after = self._await(lambda: next((each for each in self._after(before) if len(each.instances) == size), None))
        used = {"cpu_s": self._job.cpu_s() - agents, "redis_cpu_s": self._redis_cpu_s() - redis}
        if case == "leave":
            self._job.wait_for_end(instance)
        time.sleep(max(0.0, began + COUNTED_S - time.time()))
        steps = self._log.steps()
        return {
            "pause_s": pause_s(steps, before.generation, after),
            "total_s": after.at - began,
            "most_commands_per_s": self._counter.most_per_s(began, time.time()),
            "faults": faults(steps, before.generation),
            **used,
        }

    def _after(self, before: Resumed) -> list[Resumed]:
        return resumed(self._log.steps(), before.generation)

    def _redis_cpu_s(self) -> float:
        used = self._redis.cpu_times()
        return float(used.user + used.system)

    def _await(self, find: Any) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (found := find()):
            if time.monotonic() > until or not self._job.running():
                raise SystemExit(f"training does not go on in {self._job.folder}")
            time.sleep(LOOK_EVERY_S)
        return found


def measure(size: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of a job of so many instances."""
    folder.mkdir()
    with contextlib.ExitStack() as opened:
        redis = opened.enter_context(RedisServer(folder / "redis"))
        counter = opened.enter_context(contextlib.closing(CommandCounter(redis.url)))
        job = opened.enter_context(contextlib.closing(LightJob(folder, redis.url, size, options.step_ms)))
        scale = Scale(job, psutil.Process(redis.pid), counter)
        scale.begin(options.at_once)
        found: dict[str, Any] = {"size": size, "steady": scale.steady(options.seconds)}
        print(f"{size} instances: {found['steady']}", file=sys.stderr, flush=True)
        for number in range(options.repeat):
            for case in ("leave", "join"):
                change = scale.change(case, (1 + 7 * number) % size)
                print(f"{size} instances, {case}: {change}", file=sys.stderr, flush=True)
                found.setdefault(case, []).append(change)
    return found


def missed(results: list[dict[str, Any]]) -> list[str]:
    """Return the requirements that are not met."""
    problems = []
    for found in results:
        for case in ("leave", "join"):
            limit_s, name = LONGEST_PAUSE * results[0][case]["pause_s"], f"{found['size']} instances, {case}"
            if found[case]["pause_s"] > limit_s:
                problems.append(
                    f"{name}: paused for {found[case]['pause_s']:.2f} s, at most {limit_s:.2f} s is allowed"
                )
            problems += [f"{name}: {fault}" for fault in found[case]["faults"]]
        rates = [found["steady"]["commands_per_s"], *(found[case]["most_commands_per_s"] for case in ("leave", "join"))]
        if max(rates) > MOST_COMMANDS_PER_S:
            rate = f"{max(rates):.0f} commands in a second, allowed are {MOST_COMMANDS_PER_S}"
            problems.append(f"{found['size']} instances: {rate}")
    return problems


def summed_up(changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, and the worst."""
    of = {name: [change[name] for change in changes] for name in changes[0]}
    numbers = {name: round(statistics.median(of[name]), 3) for name in of if name != "faults"}
    return {
        **numbers,
        "worst_pause_s": round(max(of["pause_s"]), 3),
        "faults": [each for one in of["faults"] for each in one],
    }


def show(found: dict[str, Any]) -> None:
    """Print a table, and what is missed."""

    def rows(result: dict[str, Any]) -> list[list[str]]:
        steady = result["steady"]
        first = [
            str(result["size"]),
            f"{steady['commands_per_s']:.0f}",
            f"{steady['cpu_s']:.2f}",
            f"{steady['redis_cpu_s']:.3f}",
        ]
        cases = []
        for case in ("leave", "join"):
            one = result[case]
            limit = LONGEST_PAUSE * found["results"][0][case]["pause_s"]
            times = [f"{one[name]:.2f}" for name in ("pause_s", "worst_pause_s")]
            more = [
                f"{limit:.2f}",
                f"{one['most_commands_per_s']:.0f}",
                f"{one['cpu_s']:.2f}",
                f"{one['redis_cpu_s']:.2f}",
            ]
            cases.append([*(first if not cases else [""] * len(first)), case, *times, *more])
        return cases

    headings = ["instances", "commands/s", "CPU s/s", "of Redis", "change", "pause s", "worst", "must"]
    table = [row for result in found["results"] for row in rows(result)]
    print_table([*headings, "most commands/s", "CPU s", "of Redis"], table)
    print(*(f"MISSED: {problem}" for problem in found["missed"]) if found["missed"] else ("PASS",), sep="\n")


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=at_least_1, nargs="+", default=[4, 16, 64], help="instances, smallest first")
    parser.add_argument("--step-ms", type=at_least_1, default=200, help="asleep, as if a GPU computed")
    parser.add_argument("--repeat", type=at_least_1, default=3, help="rounds of a leave and a join")
    parser.add_argument("--seconds", type=at_least_1, default=10, help="for commands and CPU while nothing changes")
    parser.add_argument("--at-once", type=at_least_1, default=8, help="instances that are started together")
    parser.add_argument("--keep", type=Path, help="where to leave what agents and trainers wrote")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edl-scale-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measured = [measure(size, options, folder.resolve() / str(size)) for size in options.sizes]
    results = [{**each, "leave": summed_up(each["leave"]), "join": summed_up(each["join"])} for each in measured]
    found = {"cores": os.cpu_count(), "results": results, "missed": missed(results)}
    show(found)
    if options.json:
        print(json.dumps(found))
    sys.exit(bool(found["missed"]))


if __name__ == "__main__":
    main()
