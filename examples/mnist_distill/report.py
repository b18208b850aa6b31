"""Shows the result of a distillation as a table, and stores it.

    python report.py --keep DIR < result.json     # also writes DIR/summary.txt and summary.json
    python report.py DIR/summary.json             # the same table again
    python report.py DIR/summary.json --picture accuracies.svg

A result is what `EdlDistillOperator` returns. The picture needs edl-airflow[plot].
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 100


def table_of(result: dict[str, Any]) -> Table:
    """Return a table of accuracies, speeds and requests per teacher."""
    metrics = result["metrics"]
    answered = metrics["answered"]
    seeds = f"{len(metrics['seeds'])} seed{'s' if len(metrics['seeds']) > 1 else ''}"
    table = Table(
        title=f"{metrics['labels']} labels, {metrics['images']:,} images; mean ± standard deviation of {seeds}",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("accuracy", "samples/s", "accuracy by seed"):
        table.add_column(heading, justify="right")
    table.add_row("teacher", f"{metrics['teacher_accuracy']:.1%}")
    for name, way in (("student alone", metrics["alone"]), ("student distilled", metrics["distilled"])):
        accuracy = f"{way['accuracy_mean']:.1%} ± {way['accuracy_spread']:.1%}"
        by_seed = "  ".join(f"{value:.1%}" for value in way["accuracies"])
        table.add_row(name, accuracy, f"{way['samples_per_s']:,}", by_seed)
    table.add_section()
    table.add_row("teachers used", str(len(answered)))
    for address, requests in sorted(answered.items()):  # a request of the student is a whole batch
        table.add_row(f"  {address}", "", "", f"{requests:,} batches answered")
    return table


def keep(result: dict[str, Any], folder: Path) -> Path:
    """Write the result and its table into `folder`; return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / "summary.json"
    numbers.write_text(json.dumps(result, indent=2) + "\n")
    with (folder / "summary.txt").open("w") as file:
        Console(file=file, width=WIDTH).print(table_of(result))
    return numbers


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw the accuracy of each seed as a dot, their means as bars, and the teacher's as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "edl"
    metrics = result["metrics"]
    figure, axis = plt.subplots(figsize=(7.5, 2.4), layout="constrained")
    for row, (way, colour) in enumerate((("distilled", "#4a6fa5"), ("alone", "#8c5e2a"))):
        accuracies = [100 * value for value in metrics[way]["accuracies"]]
        axis.barh(row, 100 * metrics[way]["accuracy_mean"], height=0.5, color=colour, alpha=0.3)
        axis.plot(accuracies, [row] * len(accuracies), "o", color=colour)
    axis.axvline(100 * metrics["teacher_accuracy"], color="#333333", linewidth=1, label="teacher")
    axis.set_yticks([0, 1], ["student distilled", "student alone"])
    axis.set_xlim(0, 100)
    axis.set_xlabel("accuracy on what is held out, %")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(picture, dpi=110, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Read a result, show it and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", nargs="?", type=Path, help="a stored result; by default standard input")
    parser.add_argument("--keep", type=Path, help="the folder to store it in")
    parser.add_argument("--picture", type=Path, help="draw the accuracies into this .svg or .png")
    options = parser.parse_args()
    result = json.loads(options.summary.read_text() if options.summary else sys.stdin.read())
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table_of(result))
    if options.picture:
        draw(result, options.picture)
    if options.keep:
        print(keep(result, options.keep))  # the last line is what a BashOperator returns


if __name__ == "__main__":
    main()
