"""How fast a student gets its batches with teachers' answers in them, compared with the bare source.

    python benchmarks/distill_reader.py --data img224 --format batch --json
    python benchmarks/distill_reader.py --dtype uint8 --against dtype=float32
    python benchmarks/distill_reader.py --teacher-ms 20 --teachers 2 --against teachers=1

Teachers are processes of their own on real sockets that answer at once, or asleep after `--teacher-ms`. Plain iteration
of the same source and distilled epochs take turns, and the medians count; so does the same with one option changed, if
asked for by `--against`. With `--json` the last line is one JSON object.

In the format "sample", both consumers hold as many samples as make a batch before they drop them, as a student does
that trains on batches. `ratio_dropped_at_once` is for those that drop each sample at once: then a bare source gets the
same memory, which is still in the processor's cache, for every sample.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterable

import msgspec
from _data import DATA
from _flags import at_least_1
from _measuring import Run
from _reading import FORMATS, Case, reading

ROUNDS = 5


def benchmark(case: Case, other: Case | None) -> dict[str, str | int | float]:
    """Return the measurements, with the unit in each name."""
    runs: dict[str, list[Run]] = {}
    hold = case.batch_size if case.format == "sample" else 1
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(reading(case))
        others = None if other is None else stack.enter_context(reading(other))
        for _ in range(ROUNDS):
            runs.setdefault("plain", []).append(mine.take(mine.plain(), hold))
            runs.setdefault("distilled", []).append(mine.take(mine.distilled, hold))
            if hold > 1:
                runs.setdefault("plain dropped", []).append(mine.take(mine.plain(), 1))
                runs.setdefault("distilled dropped", []).append(mine.take(mine.distilled, 1))
            if others is not None:
                runs.setdefault("other", []).append(others.take(others.distilled, hold))

    def rate(name: str) -> float:
        return case.passes * case.batch_size / statistics.median(run.wall_s for run in runs[name])

    def ms_a_batch(seconds: Iterable[float]) -> float:
        return round(1000 * statistics.median(seconds) / case.passes, 3)

    plain, distilled = runs["plain"], runs["distilled"]
    found: dict[str, str | int | float] = {
        **{name: value for name, value in msgspec.to_builtins(case).items() if value not in ("", None)},
        "batches": case.passes,
        "samples_per_s": round(rate("distilled"), 1),
        "plain_samples_per_s": round(rate("plain"), 1),
        "ratio": round(rate("distilled") / rate("plain"), 4),
        "wall_ms_per_batch": ms_a_batch(run.wall_s for run in distilled),
        "student_cpu_ms_per_batch": ms_a_batch(run.cpu_s for run in distilled),
        "teachers_cpu_ms_per_batch": ms_a_batch(run.others_cpu_s for run in distilled),
        "plain_cpu_ms_per_batch": ms_a_batch(run.cpu_s for run in plain),
    }
    if hold > 1:
        found["ratio_dropped_at_once"] = round(rate("distilled dropped") / rate("plain dropped"), 4)
        found["plain_samples_per_s_dropped_at_once"] = round(rate("plain dropped"), 1)
    if others is not None:
        found["other_samples_per_s"] = round(rate("other"), 1)
        found["ratio_to_other"] = round(rate("distilled") / rate("other"), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="img224")
    parser.add_argument("--format", choices=FORMATS, default="batch")
    parser.add_argument("--dtype", choices=["float32", "uint8"], default="", help="of images; by default float32")
    parser.add_argument("--batch-size", type=at_least_1, default=32)
    parser.add_argument("--teacher-batch-size", type=at_least_1, help="by default the reader's own")
    parser.add_argument("--teachers", type=at_least_1, default=2)
    parser.add_argument("--teacher-ms", type=float, default=0.0, help="how long a teacher sleeps over each answer")
    parser.add_argument(
        "--batches", type=at_least_1, default=0, help="in each pass over the data; by default some seconds'"
    )
    parser.add_argument("--against", metavar="OPTION=VALUE", help="measure this too, as in teachers=1 or dtype=float32")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = vars(parser.parse_args())
    as_json, against = options.pop("json"), options.pop("against")
    try:
        case = msgspec.convert(options, Case)
        name, given, value = (against or "").partition("=")
        if against and not given:
            parser.error(f"--against: got {against!r}, allowed is OPTION=VALUE")
        changed = {name: value} if against else {}
        other = msgspec.convert({**options, **changed}, Case, strict=False) if against else None
    except ValueError as error:  # msgspec's errors are ValueErrors
        parser.error(str(error))
    result = benchmark(case, other)
    if other is not None:
        result["other"] = against
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:36} {value:>14,}" if isinstance(value, int | float) else f"{name:36} {value:>14}")


if __name__ == "__main__":
    main()
