"""Save Paddle's LeNet and ResNet18 for 32x32 images, with random weights, into the folder given.

A script of its own: importing Paddle takes seconds and warns.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

from paddle import jit, static  # noqa: E402 - after the warnings are off
from paddle.vision.models import LeNet, resnet18  # noqa: E402

FOLDER = Path(sys.argv[1])
NETS = {"lenet": (LeNet(), (1, 28, 28)), "resnet18": (resnet18(num_classes=10), (3, 32, 32))}

for name, (net, shape) in NETS.items():
    net.eval()
    image = static.InputSpec([None, *shape], "float32", "image")
    jit.save(jit.to_static(net, full_graph=True), str(FOLDER / name / "net"), input_spec=[image])
