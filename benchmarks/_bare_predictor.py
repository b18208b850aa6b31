"""A model without a server: runs for each number of seconds that it reads, and prints a line.

    python benchmarks/_bare_predictor.py FOLDER ROWS

A line has the number of runs, the seconds, and the CPU seconds.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from edl_runtime.teacher.models.loading import load_model, zeros
from edl_runtime.teacher.models.model import ModelOptions


def main() -> None:
    model = load_model(ModelOptions(model=sys.argv[1]))
    inputs = {spec.name: np.repeat(zeros(spec), int(sys.argv[2]), axis=0) for spec in model.signature.inputs}
    names = [spec.name for spec in model.signature.outputs]
    print("ready", flush=True)
    for line in sys.stdin:
        runs, began_s, began_cpu_s = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began_s < float(line):
            model.run(inputs, names)
            runs += 1
        print(runs, time.perf_counter() - began_s, time.process_time() - began_cpu_s, flush=True)


if __name__ == "__main__":
    main()
