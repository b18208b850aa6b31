"""The example of ResNets by EDL's own flags: a step or two on small pictures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = EXAMPLES / "resnet_distill" / "train.py"
SMALL = ("--class_dim=3", "--image_shape=3,32,32", "--resize_short_size=36", "--batch_size=8", "--num_epochs=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder of 18 pictures of noise for training and 6 to test."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog", "owl"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (48, 40, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.jpg")
    return folder


def run(folder: Path, data: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TRAIN), f"--data_dir={data}", *SMALL, *flags]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module."""
    pytest.importorskip("paddle")
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(TRAIN.parent), *sys.path])
    import train

    yield train
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(EXAMPLES)):
            del sys.modules[name]


def test_a_student_trains_by_the_flags_of_edl(
    tmp_path: Path,
    data: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A ResNet50_vd on the answers of a teacher that the same script has trained, with pictures from worker processes.

    The flags are those of EDL's train_student.sh, and some that Paddle no longer has.
    """
    taught = run(tmp_path, data, "--model=ResNet18_vd", "--num_workers=0")
    assert taught.returncode == 0, taught.stderr[-3000:]
    assert "ResNet18_vd: acc1" in taught.stdout

    command = [sys.executable, "-m", "edl_runtime.cli", "compare", "--json", "--ways", "service"]
    command += ["--model", "output/ResNet18_vd/teacher", "--outputs", "logits=fetch_name_0"]
    command += ["--", "python", str(TRAIN), f"--data_dir={data}", *SMALL, "--model=ResNet50_vd", "--num_workers=2"]
    command += ["--lr_strategy=cosine_warmup_decay", "--use_distill_service=True", "--fuse=True", "--with_mem_opt=True"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = msgspec.json.decode(done.stdout)
    assert row["runs"][0]["batch_size"] == 8

    weights = tmp_path / "output" / "ResNet50_vd" / "weights.safetensors"
    monkeypatch.chdir(tmp_path)

    def begin(model: str) -> None:
        flags = (f"--model={model}", "--num_epochs=0", f"--pretrained_model={weights}")
        monkeypatch.setattr(sys, "argv", ["train.py", f"--data_dir={data}", *SMALL, *flags])
        script.run(script.main)

    begin("ResNet50_vd")
    with pytest.raises(SystemExit) as ended:
        begin("ResNet18_vd")
    assert ended.value.code == 65
    assert "allowed is weights of the names and shapes of --model and --class_dim" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--use_mixup=True",), "--use_mixup: got 'True', allowed is to leave it out"),
        (("--image_shape=1,32,32",), "--image_shape: got grey pictures, allowed is 3,height,width"),
        (("--image_shape=32",), "argument --image_shape: got '32', allowed is channels,height,width"),
        (("--class_dim=2",), "train: got 3 classes, allowed is 2 at most, as --class_dim says"),
        (("--batch_size=19",), "train: got 18 pictures, allowed is --batch_size, 19, or more"),
        (("--num_epochs=0", "--pretrained_model=no"), "pretrained_model: got 'no', allowed is a readable safetensors"),
    ],
)
def test_flags_that_cant_be_used_are_refused(
    *,
    script: ModuleType,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    complaint: str,
) -> None:
    """With what was given and what is allowed."""
    monkeypatch.setattr(sys, "argv", ["train.py", f"--data_dir={data}", *SMALL, "--model=ResNet18_vd", *flags])
    with pytest.raises(SystemExit) as ended:
        script.run(script.main)
    assert ended.value.code in {2, 65}
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "batch", "rates"),
    [
        ("cosine_decay", 512, {0: 0.1, 500: 0.05, 1000: 0.0}),
        ("linear_decay", 512, {0: 0.1, 500: 0.05, 1000: 0.0}),
        ("piecewise_decay", 512, {0: 0.1, 25: 0.15, 50: 0.2, 299: 0.2, 300: 0.02, 600: 0.002, 999: 0.00002}),
        ("piecewise_decay", 128, {0: 0.0, 25: 0.025, 50: 0.05, 299: 0.05, 300: 0.005}),
        ("cosine_warmup_decay", 512, {0: 0.0, 25: 0.1, 50: 0.2, 525: 0.1, 1000: 0.0}),
    ],
)
def test_rates_follow_the_strategy(script: ModuleType, strategy: str, batch: int, rates: dict[int, float]) -> None:
    """Of 100 epochs of ten steps; with warm-up, a batch of 512 has twice the rate of --lr, one of 128 half of it."""
    options: Any = type("Options", (), {"num_epochs": 100, "lr": 0.1, "lr_strategy": strategy})
    rate = script.learning_rate(options, 10, batch)
    seen = {}
    for step in range(1001):
        if step in rates:
            seen[step] = rate()
        rate.step()
    assert seen == pytest.approx(rates, abs=1e-3 if "cosine" in strategy else 1e-6)
