"""Save small Paddle models for tests: `new` in today's format, `old` in Paddle 2's, under the folder given.

A script of its own: saving reads its source from a file, and importing Paddle warns.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import paddle  # noqa: E402 - after the warnings are off

FOLDER = Path(sys.argv[1])


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = paddle.nn.Embedding(50, 8), paddle.nn.Linear(8, 3)

    def forward(self, ids: Any, mask: Any) -> Any:
        hidden = paddle.sum(self.embed(ids) * paddle.unsqueeze(mask, -1), axis=1)
        return self.out(hidden), paddle.argmax(self.out(hidden), axis=-1)


net = Net()
net.eval()
spec = [paddle.static.InputSpec([None, 6], "int64", "ids"), paddle.static.InputSpec([None, 6], "float32", "mask")]
paddle.jit.save(paddle.jit.to_static(net, full_graph=True), str(FOLDER / "new" / "net"), input_spec=spec)

paddle.enable_static()
with paddle.pir_utils.OldIrGuard():
    program, startup = paddle.static.Program(), paddle.static.Program()  # type: ignore[no-untyped-call]
    with paddle.static.program_guard(program, startup):
        image = paddle.static.data("image", [None, 4], "float32")
        logits = paddle.static.nn.fc(image, 2)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    paddle.static.save_inference_model(str(FOLDER / "old" / "net"), [image], [logits], executor, program=program)
