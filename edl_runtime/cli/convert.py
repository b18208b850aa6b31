"""`edl convert`: a reader's samples as shards."""

from __future__ import annotations

import sys

import click

from edl_runtime.cli.options import print_json
from edl_runtime.log import log_to_stderr


@click.command
@click.argument("reader")
@click.argument("out")
@click.option(
    "--records-per-shard", type=click.IntRange(1), default=5000, show_default=True, help="The last may have fewer."
)
@click.option("--overwrite", is_flag=True, help="Replace shards that are there, once the new ones are whole.")
@click.option("--json", "as_json", is_flag=True, help="Print the shards and their records as JSON.")
def convert(*, reader: str, out: str, records_per_shard: int, overwrite: bool, as_json: bool) -> None:
    """Write the samples of READER into shards at OUT, for `run.shards`.

    READER is FILE.py:FUNCTION or package.module:FUNCTION: a function without arguments that returns a generator of
    samples, or, as in Paddle, a function that returns such a reader. OUT is a folder's path, or a URL as
    s3://bucket/train, for which the extra edl-airflow[s3] is needed. Needs the extra edl-airflow[shards].

    OUT comes into being, and is replaced, as a whole: after an error or a kill there is what was there before, and the
    same command starts over. A shard's name has its checksum, which is checked before any of its records is used.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from edl_runtime.shards.convert import convert as convert_samples
    from edl_runtime.shards.convert import load_reader

    log_to_stderr()
    shown = "{task.completed:,} records in {task.fields[shards]:,} shards"
    columns = BarColumn(), TextColumn(shown), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("", total=None, shards=0)
        made = convert_samples(
            load_reader(reader),
            out,
            records_per_shard=records_per_shard,
            overwrite=overwrite,
            advanced=lambda shards, records: progress.update(task, completed=records, shards=shards),
        )
        total = sum(made.shards.values())
        progress.update(task, total=total, completed=total, shards=len(made.shards))
    if as_json:
        print_json({"url": out, "records": total, "shards": made.shards})
        return
    click.echo(f"{total:,} records in {len(made.shards):,} shards at {out}")
