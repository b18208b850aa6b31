"""Feeds damaged and random bytes to all that reads from the network, and keeps the first that does harm.

make fuzz                                          # a million inputs
make fuzz INPUTS=200000 SEED=7                     # fewer, or others
PYTHONPATH=tests .venv/bin/python -m support.fuzzing --replay FILE   # the kept one again
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from types import FrameType

import msgspec
from support.fuzzing.cases import Case, is_worth_tracing, make
from support.fuzzing.oracles import Oracle
from support.fuzzing.peers import BreachError

HANGS_AFTER_S = 20.0


def main() -> None:
    """Fuzz, or play a kept input again. Exits 1 when an input did harm."""
    options = _options()
    signal.signal(signal.SIGALRM, _hangs)
    if options.replay:
        with closing(Oracle()) as oracle:
            _check(oracle, msgspec.json.decode(options.replay.read_bytes(), type=Case))
        print(f"{options.replay} does no harm", flush=True)
        return
    print(f"fuzzing with seed {options.seed}, {options.inputs:,} inputs", flush=True)
    began = told_at = time.monotonic()
    with closing(Oracle()) as oracle:
        for number in range(options.inputs):
            case = make(options.seed, number)
            try:
                _check(oracle, case, traces_memory=is_worth_tracing(case, number))
            except BreachError as breach:
                _keep(case, breach, options.seed, number, options.keep)
            if (now := time.monotonic()) - told_at > 1 or number + 1 == options.inputs:
                told_at = now
                rate = (number + 1) / (now - began)
                left_s = (options.inputs - number - 1) / rate
                line = f"{number + 1:,} of {options.inputs:,} inputs, {rate:,.0f}/s, {left_s:.0f} s left "
                print(f"\r{line}", end="", flush=True)
    print(f"\nseed {options.seed}: no harm done", flush=True)


def _check(oracle: Oracle, case: Case, *, traces_memory: bool = True) -> None:
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER_S)
    try:
        oracle.check(case, traces_memory=traces_memory)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _hangs(_signal: int, _frame: FrameType | None) -> None:
    raise BreachError(f"it takes longer than {HANGS_AFTER_S:g} s")


def _keep(case: Case, breach: BreachError, seed: int, number: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{case.target}-{seed}-{number}.json"
    kept.write_bytes(msgspec.json.encode(case))
    print(f"\n{case.target} {number} of seed {seed}: {breach}", file=sys.stderr)
    print(
        f"play it again, in tests/, with: {sys.executable} -m support.fuzzing --replay {kept}",
        file=sys.stderr,
        flush=True,
    )
    raise breach


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many (1,000,000)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="which; by default others each time")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="folder for an input that does harm")
    parser.add_argument("--replay", type=Path, help="play this kept input again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
