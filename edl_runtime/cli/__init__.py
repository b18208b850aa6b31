"""The `edl` command. Its subcommands are in modules of their names; `resize` and `stop` are in `jobs`.

A subcommand's module is imported only when it is run, so that `edl --help` is quick and `edl jobs` needs no Redis.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.checkpoint.errors import CheckpointHeldError
from edl_runtime.errors import EX_CONFIG, EX_DRAINED, EdlError, SpecError
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.registry.errors import DrainedError, PoolMismatchError
from edl_runtime.store.errors import RegistryAccessError
from edl_runtime.teacher.errors import ModelError

SUMMARIES = {
    "agent": "Run one instance of an elastic training.",
    "autoscale": "Resize all jobs and pools by traffic windows and the policy.",
    "checkpoints": "Show, verify, remove and request a training's checkpoints.",
    "compare": "Compare ways to distil with your own model and script.",
    "convert": "Write a reader's samples into shards.",
    "controller": "Serve the TrainingJob objects of a cluster.",
    "discovery": "Serve discovery of teachers over HTTP.",
    "drain": "Take a teacher out of its pool.",
    "events": "Show the events of a job's trainers.",
    "gateway": "Serve pools of language models to trainers over HTTP.",
    "jobs": "Show jobs and pools.",
    "logs": "Show the output of a job's instances.",
    "monitor": "Show jobs, pools, targets and reserved resources, live.",
    "pools": "Show pools and their members.",
    "register": "Keep a server that is not ours in a pool.",
    "resize": "Change the number of instances of a job or pool.",
    "run": "Train a script with a number of instances that can change.",
    "stop": "Stop jobs and pools.",
    "submit": "Start the trainings of a TrainingJob manifest.",
    "tasks": "Show the tasks that readers of a data set share.",
    "teacher": "Serve a model to students.",
    "windows": "Check traffic windows, and show what training may use.",
}
"""Every subcommand, with its line in `edl --help`."""

_MODULES = {"resize": "jobs", "stop": "jobs"}

_PERMANENT_ERRORS = (SpecError, ModelError, PoolMismatchError, CheckpointHeldError, RegistryAccessError)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in SUMMARIES:
            return None
        module = importlib.import_module(f"{__name__}.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - as above
        return [CompletionItem(name, help=line) for name, line in SUMMARIES.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


def _with_hyphens(word: str) -> str:
    """Take options with underscores, too, as EDL and Paddle Serving have them."""
    return word.replace("_", "-")


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _with_hyphens},
)
@click.version_option(package_name="edl-airflow")
def edl() -> None:
    """Elastic deep learning: teachers, jobs and pools."""


def main() -> None:
    """Run the `edl` command with this process's arguments and exit.

    Exit status 0 for success, 2 for wrong usage, EX_CONFIG (78) for errors that a restart can't fix, EX_DRAINED (75)
    for a drained teacher, 1 for the rest.
    """
    try:
        edl(prog_name="edl")
    except EdlError as error:
        with suppress(OSError):  # as of a full disk: the exit status tells more
            click.echo(f"edl: {error}", err=True)
            if isinstance(error, UnknownJobError):
                click.echo(f"edl: looked in {_where()}", err=True)
        if isinstance(error, DrainedError):
            sys.exit(EX_DRAINED)
        is_refused = isinstance(error, InferenceError) and not error.retryable
        sys.exit(EX_CONFIG if is_refused or isinstance(error, _PERMANENT_ERRORS) else 1)
    except PermissionError as error:
        click.echo(f"edl: {error.strerror}: {error.filename}; EDL_WORK_DIR names another folder", err=True)
        sys.exit(1)


def _where() -> str:
    from edl_runtime.cli import backends
    from edl_runtime.settings import RuntimeSettings

    return backends.describe_location(RuntimeSettings.from_env(os.environ))
