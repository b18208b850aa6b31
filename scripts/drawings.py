"""Writes the drawings in docs/images: `python scripts/drawings.py`. A test checks that they are current.

Their background is transparent, and their colours can be read on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parents[1] / "docs" / "images"

LINE = "#7b8794"
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"'
BLUE, GREEN, ORANGE, RED, GREY, VIOLET = "#2f6db3", "#2e7d4f", "#b45f06", "#b03a3a", "#56616d", "#7a4fa3"
HEAD = (
    f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>'
)


class Drawing:
    """Collects shapes; sizes are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._shapes = [f"<title>{escape(title)}</title>", HEAD]

    def box(self, left: int, top: int, width: int, height: int, colour: str, *lines: str) -> None:
        """Add a filled box with a bold first line."""
        self._shapes.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="{colour}"/>')
        first = top + height / 2 - 8 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.text(left + width / 2, first + 16 * number, line, colour="#ffffff", bold=number == 0)

    def frame(self, left: int, top: int, width: int, height: int, label: str) -> None:
        """Add a dashed frame around boxes."""
        self._shapes.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="10" fill="none" stroke="{LINE}" '
            'stroke-dasharray="5 4"/>'
        )
        self.text(left + 12, top + 18, label, anchor="start", bold=True)

    def text(
        self, x: float, y: float, line: str, *, colour: str = LINE, anchor: str = "middle", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" {FONT} font-size="13"{weight} fill="{colour}" text-anchor="{anchor}">'
            f"{escape(line)}</text>"
        )

    def arrow(
        self, points: Sequence[tuple[float, float]], label: str = "", *, both: bool = False, dashed: bool = False
    ) -> None:
        """Add a line through points with a head at its end, or at both; the label stands at its first part."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        dashes = ' stroke-dasharray="4 4"' if dashed else ""
        self._shapes.append(
            f'<path d="M{path}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#head)"{start}{dashes}/>'
        )
        if label:
            (x, y), (to_x, to_y) = points[:2]
            if x == to_x:
                self.text(x + 6, (y + to_y) / 2 + 4, label, anchor="start")
            else:
                self.text((x + to_x) / 2, (y + to_y) / 2 - 6, label)

    def line(self, x: float, top: float, bottom: float) -> None:
        self._shapes.append(
            f'<path d="M{x:g} {top:g} L{x:g} {bottom:g}" stroke="{LINE}" stroke-dasharray="2 4" fill="none"/>'
        )

    def svg(self) -> str:
        width, height = self._size
        shapes = "\n".join(self._shapes)
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n{shapes}\n</svg>\n'


class Step(NamedTuple):
    """Something that goes from one lane to another, or happens in one."""

    source: int
    target: int
    label: str


def life(title: str, lanes: Sequence[tuple[str, str]], steps: Sequence[Step]) -> str:
    """Return a drawing in which time goes down: a lane for each who takes part, and numbered steps between them."""
    width, row = 960, 38
    wide = width / len(lanes)
    drawing = Drawing(width, 70 + row * len(steps), title)
    middles = [wide * (number + 0.5) for number in range(len(lanes))]
    for (name, colour), middle in zip(lanes, middles, strict=True):
        drawing.box(round(middle - wide / 2 + 8), 8, round(wide - 16), 34, colour, name)
        drawing.line(middle, 42, 60 + row * len(steps))
    for number, step in enumerate(steps, 1):
        y = 48 + row * number
        label = f"{number}. {step.label}"
        x, to_x = middles[step.source], middles[step.target]
        if step.source == step.target:
            is_last = step.source == len(lanes) - 1
            drawing.text(x + (-8 if is_last else 8), y - 4, label, anchor="end" if is_last else "start")
        else:
            drawing.arrow([(x, y), (to_x, y)])
            left, right = sorted((x, to_x))
            drawing.text((left + right) / 2, y - 6, label)
    return drawing.svg()


def architecture() -> str:
    drawing = Drawing(960, 560, "Architecture: Airflow and the edl command start students, teachers and trainers")
    drawing.frame(20, 10, 560, 92, "Airflow, with edl_airflow")
    drawing.box(40, 40, 240, 48, BLUE, "operator, sensor", "in a worker")
    drawing.box(320, 40, 240, 48, BLUE, "trigger", "in the triggerer")
    drawing.arrow([(280, 64), (320, 64)])
    drawing.box(680, 40, 220, 48, GREY, "edl command")
    drawing.box(20, 150, 560, 48, GREEN, "backend", "local: a supervisor for each job · Kubernetes: Job or Deployment")
    drawing.arrow([(300, 102), (300, 150)], "JobSpec")
    drawing.arrow([(790, 88), (790, 174), (580, 174)], "JobSpec")
    drawing.frame(20, 250, 240, 110, "student")
    drawing.box(40, 284, 200, 58, VIOLET, "script with", "DistillReader")
    drawing.frame(310, 250, 270, 110, "teacher, one of a pool")
    drawing.box(326, 284, 104, 58, ORANGE, "server", "HTTP, gRPC")
    drawing.box(466, 284, 98, 58, ORANGE, "predictor", "the model")
    drawing.frame(630, 250, 310, 110, "trainer, one instance of a job")
    drawing.box(646, 284, 120, 58, VIOLET, "agent")
    drawing.box(802, 284, 122, 58, VIOLET, "worker: script", "elastic.init")
    drawing.arrow([(140, 198), (140, 250)], "starts")
    drawing.arrow([(445, 198), (445, 250)], "starts")
    drawing.arrow([(560, 198), (700, 250)])
    drawing.text(672, 222, "starts")
    drawing.arrow([(240, 313), (326, 313)], "batches", both=True)
    drawing.arrow([(430, 313), (466, 313)], both=True)
    drawing.arrow([(766, 313), (802, 313)], both=True)
    drawing.arrow([(863, 342), (863, 400)], "gradients", both=True)
    drawing.box(800, 400, 140, 44, VIOLET, "other workers")
    drawing.box(20, 470, 620, 62, RED, "Redis", "who is there · generations · shards · progress · events")
    drawing.box(690, 470, 250, 62, GREY, "checkpoints", "a folder or S3")
    drawing.arrow([(140, 360), (140, 470)], "teachers, progress", both=True)
    drawing.arrow([(382, 360), (382, 470)], "lease, load")
    drawing.arrow([(640, 342), (600, 470)], both=True)
    drawing.text(608, 410, "heartbeats", anchor="end")
    drawing.arrow([(780, 342), (760, 470)])
    drawing.text(758, 432, "rank 0", anchor="end")
    drawing.arrow([(20, 64), (8, 64), (8, 500), (20, 500)], both=True)
    drawing.text(14, 422, "status, events", anchor="start")
    return drawing.svg()


def batch() -> str:
    lanes = [("source", GREY), ("DistillReader", VIOLET), ("teacher's server", ORANGE), ("predictor", ORANGE)]
    return life(
        "The life of a batch",
        [*lanes, ("your loop", VIOLET)],
        [
            Step(0, 1, "items"),
            Step(1, 1, "cuts a batch into requests"),
            Step(1, 2, "a free connection sends one"),
            Step(2, 3, "slot of shared memory"),
            Step(3, 3, "joins what has queued, runs"),
            Step(3, 2, "answer in the slot"),
            Step(2, 1, "outputs, as raw tensors"),
            Step(1, 1, "refuses wrong shapes and NaN"),
            Step(1, 4, "the batch with its outputs, in order, once"),
        ],
    )


def resize() -> str:
    lanes = [("edl resize, a task", BLUE), ("backend", GREEN), ("new instance", VIOLET), ("Redis", RED)]
    return life(
        "The life of a resize, from two instances to three",
        [*lanes, ("the other instances", VIOLET)],
        [
            Step(0, 1, "3 instances"),
            Step(1, 2, "starts an agent"),
            Step(4, 4, "they train on"),
            Step(2, 2, "imports, builds the model"),
            Step(2, 3, "ready"),
            Step(4, 3, "proposes a generation"),
            Step(4, 4, "all stop after one step"),
            Step(4, 2, "connect, and send the state"),
            Step(4, 4, "the first step of all three"),
            Step(3, 0, "3 instances train"),
        ],
    )


def checkpoint() -> str:
    lanes = [("worker of rank 0", VIOLET), ("writer's thread", VIOLET), ("folder or S3", GREY), ("agent", VIOLET)]
    return life(
        "The life of a checkpoint",
        [*lanes, ("Redis, Airflow", RED)],
        [
            Step(0, 0, "a step is done, one is due"),
            Step(0, 1, "a copy of the state"),
            Step(0, 0, "trains on"),
            Step(1, 2, "files, under another name"),
            Step(1, 2, "manifest with checksums"),
            Step(2, 2, "visible from here on"),
            Step(1, 3, "which step it is"),
            Step(3, 4, "an event"),
            Step(4, 4, "sensor and trigger fire"),
            Step(1, 2, "removes the oldest"),
        ],
    )


DRAWINGS = {"architecture": architecture, "life-of-a-batch": batch, "life-of-a-resize": resize}
DRAWINGS["life-of-a-checkpoint"] = checkpoint

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw())
