"""`make demo`: starts Airflow on this machine, runs the quickstart in it, and shows the results.

Keeps the UI up until Ctrl-C; with DEMO_EXIT=1 it ends by itself. Its files are in `.demo`, and no process outlives it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import quote
from typing import NoReturn

from laptop.client import AirflowClient
from laptop.follow import follow_run
from laptop.launcher import Laptop
from rich.console import Console

from edl_runtime.errors import EdlError

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo"
DAG_ID = "edl_quickstart_distill"
REPORT = ROOT / "examples" / "mnist_distill" / "report.py"

console = Console(highlight=False, soft_wrap=True)
started = time.monotonic()


def say(what: str) -> None:
    """Print a line with the time since the start."""
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    console.print(f"[dim]{minutes}:{seconds:02d}[/dim]  ", end="")
    console.print(what, markup=False)


def run_quickstart(laptop: Laptop, client: AirflowClient) -> None:
    """Run the quickstart and show its table."""
    laptop.wait_for_dag(client, DAG_ID)
    for left in client.runs(DAG_ID, ["queued", "running"]):
        say(f"Marking run {left.run_id} of an interrupted demo as failed")
        client.fail(left)
    client.unpause(DAG_ID)
    run = client.trigger(DAG_ID)
    say(f"Triggered {DAG_ID}: {laptop.url}/dags/{DAG_ID}/runs/{run.run_id}")
    follow_run(client, run, say, check=laptop.check)
    kept = client.xcom(run, "report")
    say("Done")
    console.print()
    subprocess.run([sys.executable, str(REPORT), kept], check=True)
    console.print(f"Kept in {Path(kept).parent}")


def stay(laptop: Laptop) -> NoReturn:
    """Keep the UI up until Ctrl-C."""
    console.print(f"The edl command sees its jobs and pools: . {quote(str(laptop.edl_variables))}; .venv/bin/edl jobs")
    console.print("Ctrl-C stops Airflow and ends the demo.")
    while True:
        laptop.check()
        time.sleep(1)


def main() -> int:
    """Return the exit status: 0 if the run has succeeded."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    succeeded = False
    try:
        with Laptop(HOME, dags=ROOT / "dags", environ=os.environ, say=say) as laptop, laptop.client() as client:
            login = f"{laptop.url}, user {laptop.user}, password {laptop.password}"
            say(f"Watch it at {login}")
            run_quickstart(laptop, client)
            succeeded = True
            console.print(f"Airflow is at {login}")
            if os.environ.get("DEMO_EXIT") != "1":
                stay(laptop)
    except KeyboardInterrupt:
        pass
    except (EdlError, TimeoutError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: ", end="")
        console.print(str(error), markup=False)
        succeeded = False
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
