"""`edl compare`: ways to distil, measured on this machine with one's own model and script."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import click
import msgspec

from edl_runtime.cli.options import parse_gpu_ids, print_table, split_list
from edl_runtime.compare.comparison import Comparison
from edl_runtime.compare.comparison import compare as measure
from edl_runtime.compare.results import HEADINGS, TITLES, WAYS, ComparisonRow, json_rows, parse_ways, table_cells
from edl_runtime.elastic.agent.launch import parse_entrypoint
from edl_runtime.teacher.models.loading import check_model_files
from edl_runtime.teacher.models.model import ModelOptions

TELL_EVERY_S = 5.0


@click.command
@click.option("--model", required=True, help="What teachers serve, as in `edl teacher`.")
@click.option("--teachers", type=click.IntRange(1), default=1, show_default=True, help="How many serve.")
@click.option("--outputs", default="", help="Outputs to serve, as in `edl teacher`.")
@click.option("--gpu-ids", default="", help="GPUs of the teachers, as in 0,1; by default the CPU.")
@click.option(
    "--pure",
    metavar="FLAGS",
    default="",
    help="Added to the script to train without distillation, as in --use_distill_service=no or DISTILL=0.",
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
    """Run COMMAND, a student's script, in several ways, and print how good and how fast each is.

    \b
    none       without distillation: no EDL_TEACHERS, and what --pure adds
    inprocess  the teacher's model runs in the student's process
    offline    the script runs once to write answers to disk, then again to be trained from them
    service    teachers serve

    The script's DistillReader must take its teachers from the environment; nothing else changes between the last three.
    It has to call write_result(metrics={"accuracy": …, "samples_per_s": …, "batch_size": …}) at its end.

    Put -- before COMMAND. A model or a script that is not there is an error before anything is run. Exits with 1 when a
    way failed; the others are measured all the same. However it ends, no process is left; kill -9 leaves a folder,
    edl-compare-…, among the temporary files.
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
                progress.tell(f"{TITLES[way]}")
                rows.append(measure(what, way, progress.tell))
                progress.done(rows[-1])
    finally:
        if rows:
            _show(rows, as_json=as_json)
    sys.exit(any(row.reason for row in rows))


def _show(rows: list[ComparisonRow], *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(json_rows(rows))))
        return
    print_table(HEADINGS, table_cells(rows))
    for row in rows:
        if row.reason:
            click.echo(f"\n{TITLES[row.way]} failed: {row.reason}")
            for line in row.last_lines:
                click.echo(f"  {line}")


class _Progress:
    """What is going on, on standard error: in one line that changes on a terminal, else a line every few seconds."""

    def __enter__(self) -> Self:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._status.start()
        self._told_at = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._status.stop()

    def tell(self, line: str) -> None:
        from rich.text import Text

        self._status.update(Text(line, overflow="ellipsis", no_wrap=True))
        if not self._console.is_terminal and time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._say(line)

    def _say(self, line: str) -> None:
        self._told_at = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def done(self, row: ComparisonRow) -> None:
        outcome = f"failed: {row.reason}" if row.reason else "measured"
        self._say(f"{TITLES[row.way]}: {outcome}")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM and a closed terminal do what Ctrl-C does, so that no process is left behind."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
