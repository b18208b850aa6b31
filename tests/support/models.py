"""Models for the tests of teachers, as `edl teacher --model support.models:NAME` serves them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edl_runtime.protocol.oip import TensorSpec
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher import served

X = TensorSpec("x", "FP32", (-1, 4))
DOUBLES = served(inputs=[X], outputs=[TensorSpec("double", "FP32", (-1, 4))])


@served(inputs=[X], outputs=[TensorSpec("double", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))])
def arithmetic(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Answers at once."""
    return {"double": inputs["x"] * 2, "sum": inputs["x"].sum(axis=1)}


@DOUBLES
def slow(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Sleeps for the seconds in the first number."""
    time.sleep(float(inputs["x"][0, 0]))
    return {"double": inputs["x"] * 2}


@DOUBLES
def held(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Answers zeros at once. For other inputs it touches `begun` in HELD_MODEL_FOLDER and waits for `go` there.

    Each of these runs adds a line to `ran` with the first number of each row.
    """
    if inputs["x"].any():
        folder = Path(os.environ["HELD_MODEL_FOLDER"])
        with (folder / "ran").open("a") as ran:
            print(*(int(row[0]) for row in inputs["x"]), file=ran)
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    return {"double": inputs["x"] * 2}


@DOUBLES
def fragile(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Raises for 1, kills its process for 2."""
    if inputs["x"][0, 0] == 1:
        raise ArithmeticError("one is too many")
    if inputs["x"][0, 0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"double": inputs["x"] * 2}


@DOUBLES
def lingering(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Exits for inputs other than zeros, but has a thread that keeps the process alive."""
    if inputs["x"].any():
        threading.Thread(target=time.sleep, args=(3600,)).start()
        sys.exit(3)
    return {"double": inputs["x"] * 2}


@DOUBLES
def in_place(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Writes into its input."""
    x = inputs["x"]
    x *= 2
    return {"double": x}


@served(inputs=[X], outputs=[TensorSpec("double", "FP32", (-1, 4)), TensorSpec("codes", "FP32", (5, 2))])
def codebook(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Has an output without the batch's dimension."""
    return {"double": inputs["x"] * 2, "codes": np.ones((5, 2), np.float32)}


@served(inputs=[TensorSpec("x", "UINT8", (-1, -1))], outputs=[TensorSpec("x", "UINT8", (-1, -1))])
def echo(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """Answers its input."""
    return inputs


wrong = DOUBLES(lambda inputs: {"double": inputs["x"].astype(np.float64)})
narrow = DOUBLES(lambda inputs: {"double": inputs["x"][:, :3]})
short = DOUBLES(lambda inputs: {"double": inputs["x"][1:]})
"""Answer another dtype, another shape and a row less than they declare."""


def unmarked(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """Has no signature."""
    return inputs
