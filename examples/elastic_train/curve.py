"""Draws the curve of a job: its loss, its metrics, and how many instances trained.

    python curve.py digits curve.svg

The curve is in the Redis of EDL_REDIS_URL, where the job has reported it, until a day after its last report. Needs
edl-airflow[plot].
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from edl_runtime.errors import EdlError
from edl_runtime.progress import CurvePoint, read_curve
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

WIDTH_INCHES, PANEL_INCHES = 7.5, 1.6
COLOURS = ("#4a6fa5", "#8c5e2a", "#7a4fa3")
GREEN = "#2e7d4f"


class Panel(NamedTuple):
    """A line of the picture: its label, and its value at a point, None where there is none."""

    label: str
    value: Callable[[CurvePoint], float | None]


def panels_of(points: Sequence[CurvePoint]) -> list[Panel]:
    """Return the loss, each metric, and the instances, of those that the points have."""
    metrics = dict.fromkeys(name for point in points for name in point.metrics)
    panels = [Panel("loss", lambda point: point.loss)]
    panels += [Panel(name, lambda point, name=name: point.metrics.get(name)) for name in metrics]  # type: ignore[misc]
    panels.append(Panel("instances", lambda point: point.instances or None))
    return [panel for panel in panels if any(panel.value(point) is not None for point in points)]


async def points_of(job: str) -> list[CurvePoint]:
    """Return the curve of a job. Raises EdlError without a Redis, ValueError if it has none."""
    settings = RuntimeSettings.from_env(os.environ)
    async with connect(settings.redis_url) as client:
        points = await read_curve(client, settings.namespace, job)
    if not any(point.loss is not None for point in points):
        raise ValueError(
            f"job: got {job!r}, which has reported no loss, allowed is one that `edl jobs` shows a loss of"
        )
    return points


def draw(points: Sequence[CurvePoint], picture: Path) -> None:
    """Draw a panel for each line, over the seconds since the first point."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "edl"
    panels = panels_of(points)
    size = (WIDTH_INCHES, PANEL_INCHES * len(panels) + 0.4)
    figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for number, (panel, axis) in enumerate(zip(panels, axes[:, 0], strict=True)):
        known = [(point.at - points[0].at, value) for point in points if (value := panel.value(point)) is not None]
        seconds, values = zip(*known, strict=True)
        if panel.label == "instances":
            axis.fill_between(seconds, values, step="post", color=GREEN, alpha=0.3)
            axis.yaxis.get_major_locator().set_params(integer=True)
            axis.set_ylim(0, max(values) + 0.5)
        else:
            axis.plot(
                seconds,
                values,
                drawstyle="default" if panel.label == "loss" else "steps-post",
                color=COLOURS[number % len(COLOURS)],
            )
            axis.ticklabel_format(axis="y", useOffset=False)
        axis.set_ylabel(panel.label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="its name")
    parser.add_argument("picture", type=Path, help="an .svg or .png")
    options = parser.parse_args()
    try:
        points = asyncio.run(points_of(options.job))
    except (EdlError, ValueError) as error:
        sys.exit(f"curve.py: {error}")
    draw(points, options.picture)
    print(options.picture.absolute())


if __name__ == "__main__":
    main()
