"""Draws students' accuracies by epoch, as `student.py --curves DIR` has written them, and prints them as a table.

    python curves.py DIR picture.svg --teacher teacher

Needs edl-airflow[plot].
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

Curves = dict[tuple[str, int | None], list[list[float]]]
"""The accuracies after each epoch, 0 to 1, of each seed, by the way of training and the number of known labels."""

COLOURS = {"alone": "#8c5e2a", "distilled": "#4a6fa5"}
STYLES = ("-", "--", ":", "-.")


def read_curves(folder: Path) -> Curves:
    """Return the curves of a folder. Raises ValueError if it has none, or seeds of different length."""
    curves: Curves = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        curve = json.loads(file.read_text())
        curves[curve["way"], curve["labels"]].append(curve["accuracies"])
    if not curves:
        raise ValueError(f"{folder}: got no curves, allowed is what student.py --curves writes")
    for key, seeds in curves.items():
        if len({len(accuracies) for accuracies in seeds}) > 1:
            raise ValueError(
                f"{folder}: got different numbers of epochs for {told(*key)}, allowed is one for all seeds"
            )
    return curves


def told(way: str, labels: int | None) -> str:
    """Return the name of a curve."""
    return f"{way}, {f'{labels:,}' if labels else 'all'} labels"


def draw(curves: Curves, teacher: float | None, picture: Path) -> None:
    """Draw each mean over the seeds as a line, in a band from the worst seed to the best."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "edl"
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    known = sorted({labels or sys.maxsize for _, labels in curves}, reverse=True)
    for (way, labels), seeds in sorted(curves.items(), key=lambda item: (-(item[0][1] or sys.maxsize), item[0][0])):
        epochs = range(1, len(seeds[0]) + 1)
        low, mean, high = ([100 * of(each) for each in zip(*seeds, strict=True)] for of in (min, statistics.mean, max))
        style = STYLES[known.index(labels or sys.maxsize) % len(STYLES)]
        axis.plot(epochs, mean, style, color=COLOURS[way], label=told(way, labels))
        axis.fill_between(epochs, low, high, color=COLOURS[way], alpha=0.2, linewidth=0)
    if teacher is not None:
        axis.axhline(100 * teacher, color="#333333", linewidth=1, label="teacher")
    axis.set_xlabel("epoch")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel("accuracy on what is held out, %")
    figure.legend(loc="outside right upper", fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Draw the picture and print the last accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path, help="an .svg or .png")
    parser.add_argument("--teacher", type=Path, help="folder of the teacher's model, for its accuracy")
    options = parser.parse_args()
    try:
        curves = read_curves(options.folder)
    except ValueError as error:
        sys.exit(f"curves.py: {error}")
    teacher = json.loads((options.teacher / "about.json").read_text())["accuracy"] if options.teacher else None
    draw(curves, teacher, options.picture)
    if teacher is not None:
        print(f"teacher: {teacher:.2%}")
    for key, seeds in curves.items():
        print(f"{told(*key)}: {'  '.join(f'{accuracies[-1]:.2%}' for accuracies in seeds)}")
    print(options.picture.absolute())  # the last line is what a BashOperator returns


if __name__ == "__main__":
    main()
