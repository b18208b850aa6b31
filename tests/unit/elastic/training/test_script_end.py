"""Whether a training script has run to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import builtins, pickle, sys, threading
from edl_runtime.elastic.comm.agent_protocol import StandaloneClient
from edl_runtime.elastic.training.script_end import at_script_end

def main(status=None):
    at_script_end(StandaloneClient(), lambda: print("ended"), lambda: False)
    return status

def exit_and_go_on(status):
    try:
        sys.exit(status)
    except SystemExit:
        pass

def exit_in_a_thread():
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
"""

GOOD = [
    "for number in range(3): main(); break",
    "try: main(); 1 / 0\nexcept ZeroDivisionError: pass",
    "sys.exit(main())",
    "sys.exit(main(0))",
    "main(); builtins.exit(code=0)",
    "main(); exit_and_go_on(3); pickle.dumps(sys.exit)",
]
BAD = [
    "main(); sys.exit(3)",
    "sys.exit(main('no GPU'))",
    "raise SystemExit(main(3))",
    "main(); builtins.exit(3)",
    "main(); exit_in_a_thread(); raise SystemExit(3)",
    "main(); 1 / 0",
    "main(); exit_and_go_on(0); 1 / 0",
]


def ending_of(tmp_path: Path, source: str, *options: str) -> str:
    """Return what is done at the end of a script: "ended", or the warning that nothing is."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN + source)
    done = subprocess.run(
        [sys.executable, *(options or [str(script)])],
        check=False,
        cwd=tmp_path,
        input=f"{TRAIN}\n{source}\n",
        capture_output=True,
        text=True,
    )
    return "ended" if "ended" in done.stdout.splitlines() else done.stderr


@pytest.mark.parametrize("source", GOOD)
def test_a_script_that_exits_with_0_has_run_to_its_end(tmp_path: Path, source: str) -> None:
    """Whether it returns or exits, and whatever it has handled before."""
    assert ending_of(tmp_path, source) == "ended"


@pytest.mark.parametrize("source", BAD)
def test_a_script_that_fails_has_not_run_to_its_end(tmp_path: Path, source: str) -> None:
    """By an error or by its exit status, whether sys.exit or `raise` gives that."""
    assert "training.not_ended" in ending_of(tmp_path, source)


@pytest.mark.parametrize("options", [["-m", "train"], ["-m", "cProfile", "train.py"]], ids=["module", "profiler"])
def test_a_script_that_another_module_runs_is_watched(tmp_path: Path, options: list[str]) -> None:
    """Not that module, which goes on after it."""
    assert "training.not_ended" in ending_of(tmp_path, "main(); sys.exit(3)", *options)
    assert ending_of(tmp_path, "sys.exit(main())", *options) == "ended"


def test_an_interactive_session_ends_its_training(tmp_path: Path) -> None:
    """Even after an error that the user has seen."""
    assert ending_of(tmp_path, "\nmain()\n1 / 0\n", "-i") == "ended"
