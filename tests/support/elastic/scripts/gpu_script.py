"""elastic_script as if its model were on a GPU. `nccl_error`: the text of what each sum with other ranks fails with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

import elastic_script
from paddle.base import core, framework
from support.elastic.fake_gpu import ON_GPU, FakeNccl

import edl_runtime.elastic  # noqa: F401 -- by this the agent sees that the script is elastic

if __name__ == "__main__":
    framework.EagerParamBase.place = ON_GPU
    core.ProcessGroupNCCL = FakeNccl
    if error := json.loads(os.environ["SCRIPT_OPTIONS"]).get("nccl_error"):
        FakeNccl.error = OSError(error)
    elastic_script.main(Path(sys.argv[1]))
