"""`edl compare`: compare ways to distil on this machine, with your own model and script."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import click

from edl_runtime.cli.options import parse_gpu_ids, print_json, print_table, split_list
from edl_runtime.compare.comparison import Comparison
from edl_runtime.compare.comparison import compare as measure
from edl_runtime.compare.results import (
    HEADINGS,
    TITLES,
    WAYS,
    ComparisonRow,
    interval_lines,
    json_rows,
    parse_ways,
    table_cells,
)
from edl_runtime.elastic.agent.entrypoint import parse_entrypoint
from edl_runtime.teacher.models.loading import check_model_files
from edl_runtime.teacher.models.model import ModelOptions

PRINT_EVERY_S = 5.0


@click.command
@click.option("--model", required=True, help="The teachers' model, as in `edl teacher`.")
@click.option("--teachers", type=click.IntRange(1), default=1, show_default=True, help="Number of teachers.")
@click.option("--outputs", default="", help="Outputs to serve, as in `edl teacher`.")
@click.option("--gpu-ids", default="", help="GPUs of the teachers, as in 0,1; by default the CPU.")
@click.option(
    "--pure",
    metavar="FLAGS",
    default="",
    help="Flags that make the script train without distillation, as in --use_distill_service=no or DISTILL=0.",
)
@click.option("--ways", default=",".join(WAYS), show_default=True, help="Which to run, in this order.")
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Runs of each.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of the ways with all their runs.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def compare(
    *,
    model: str,
    teachers: int,
    outputs: str,
    gpu_ids: str,
    pure: str,
    ways: str,
    repeat: int,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, a student's script, in several ways, and print the accuracy and speed of each.

    \b
    none       without distillation: without EDL_TEACHERS, with the flags of --pure
    inprocess  the teacher's model runs in the student's process
    offline    the script runs once to write answers to disk, then again to train from them
    service    teachers serve

    The script's DistillReader must take its teachers from the environment; nothing else changes between the last three.
    It must call write_result(metrics={"accuracy": …, "samples_per_s": …, "batch_size": …}) at its end.

    With --repeat, put {seed} where the script takes its seed, as in --seed {seed}: it is 0 in the first run of each
    way, 1 in the second, and so on. Then gains over "none" are of runs with the same seed. Confidence intervals of less
    than three runs are too wide to be useful. "offline" writes answers once for each seed.

    Put -- before COMMAND. A missing model or script is an error before anything runs. Exits with 1 when a way failed;
    the others are still measured. No process is left behind; after kill -9 a temporary folder edl-compare-… remains.
    """  # noqa: D301 - a backspace is what keeps click from joining the lines
    wanted = parse_ways(ways)
    script = parse_entrypoint(command)
    if set(wanted) != {"none"}:
        check_model_files(ModelOptions(model=model, outputs=split_list(outputs)))
    what = Comparison(
        model=model,
        command=script.command,
        teachers=teachers,
        outputs=outputs,
        gpu_ids=parse_gpu_ids(gpu_ids),
        pure=pure,
        repeat=repeat,
    )
    rows: list[ComparisonRow] = []
    try:
        with _ended_by_sigterm(), _Progress() as progress:
            for way in wanted:
                progress.update(TITLES[way])
                rows.append(measure(what, way, progress.update))
                progress.done(rows[-1])
    finally:
        if rows:
            _show(rows, as_json=as_json)
    sys.exit(any(row.reason for row in rows))


def _show(rows: list[ComparisonRow], *, as_json: bool) -> None:
    if as_json:
        print_json(json_rows(rows))
        return
    print_table(HEADINGS, table_cells(rows))
    for line in interval_lines(rows):
        click.echo(line)
    for row in rows:
        if row.reason:
            click.echo(f"\n{TITLES[row.way]} failed: {row.reason}")
            for line in row.last_lines:
                click.echo(f"  {line}")


class _Progress:
    """Progress on stderr: one changing line on a terminal, otherwise a line every few seconds."""

    def __enter__(self) -> Self:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._status.start()
        self._printed_at = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._status.stop()

    def update(self, line: str) -> None:
        from rich.text import Text

        self._status.update(Text(line, overflow="ellipsis", no_wrap=True))
        if not self._console.is_terminal and time.monotonic() - self._printed_at >= PRINT_EVERY_S:
            self._print(line)

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def done(self, row: ComparisonRow) -> None:
        outcome = f"failed: {row.reason}" if row.reason else "measured"
        self._print(f"{TITLES[row.way]}: {outcome}")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that no process is left behind."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
