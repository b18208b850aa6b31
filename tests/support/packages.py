"""The distributions of this repository, built as `make build` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

UV = Path(sys.executable).with_name("uv")


def build_distributions(folder: Path) -> tuple[Path, Path]:
    """Build into `folder`; return the paths of the wheel and the source distribution."""
    command = [UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True)
    ((wheel,), (source,)) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source
