"""Makes the environments of other projects' servers, which can't live beside Airflow, for the tests marked `interop`.

    python scripts/interop.py [NAME…]

Each is of one lock in tests/interop/environments/ and becomes a folder of that name in .interop/. Where an interpreter
or a package is missing, the folder has a file `unavailable` that says why, and the tests that need it skip with that.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent.parent
LOCKS = HERE / "tests/interop/environments"
INTEROP = HERE / ".interop"
UV = Path(sys.executable).with_name("uv")
PYTHONS = {"paddle-edl": ("3.7",), "paddle-serving": ("3.8",), "triton": ("3.11", "3.10", "3.12")}

EMBEDS = """
import ctypes, sys
library = ctypes.CDLL("libpython%d.%d.so.1.0" % sys.version_info[:2])
library.Py_GetVersion.restype = ctypes.c_char_p
sys.exit(library.Py_GetVersion().decode() != sys.version)
"""
"""Whether an interpreter's library can be embedded: Triton's Python backend loads it, and this one's modules."""


class UnavailableError(Exception):
    pass


def main() -> None:
    for name in sys.argv[1:] or sorted(lock.stem for lock in LOCKS.glob("*.lock")):
        lock, folder = LOCKS / f"{name}.lock", INTEROP / name
        stamp = folder / "made-of"
        if stamp.exists() and stamp.read_text() == lock.read_text():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        try:
            make(folder, python := interpreter(name), lock)
            if name.startswith("paddle-"):
                make_brpc_libraries(folder / "brpc", python)
        except UnavailableError as error:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "unavailable").write_text(str(error))
            report(f"== {name}: not available: {error}")
        else:
            stamp.write_text(lock.read_text())
            report(f"== {name}: made")


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def interpreter(name: str) -> str:
    """Return the path of a Python that fits. Raises UnavailableError."""
    if name not in PYTHONS:
        return sys.executable
    for version in PYTHONS[name]:
        for path in [Path(f"/usr/bin/python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]:
            if path.exists() and (name != "triton" or succeeds(str(path), "-c", EMBEDS)):
                return str(path)
        if name != "triton" and (found := shutil.which(f"python{version}")):
            return found
    more = " with its libpython" if name == "triton" else ""
    raise UnavailableError(f"there is no Python {' or '.join(PYTHONS[name])}{more}")


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def make(folder: Path, python: str, lock: Path) -> None:
    for command in (
        [UV, "venv", "--quiet", "--no-python-downloads", "--python", python, folder],
        [UV, "pip", "install", "--quiet", "--no-deps", "--python", folder / "bin/python", "-r", lock],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(done.stderr.strip()[-1000:])


# The brpc clients of Paddle Serving are of 2020 and 2022: they want OpenSSL 1.0, which a wheel of those days has
# inside, and a function that glibc no longer gives away.

OLD_OPENSSL = "psycopg2-binary==2.7.7"
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
void *_dl_sym(void *handle, const char *name, void *who) { return dlsym(RTLD_NEXT, name); }
"""


def make_brpc_libraries(folder: Path, python: str) -> None:
    """Make a folder of what the client's libraries need, with the environment that finds them, if that is possible."""
    libraries = Path(python).resolve().parent.parent / "lib"
    if not ((compiler := shutil.which("cc")) and list(libraries.glob("libpython3.*.so*"))):
        return
    folder.mkdir()
    pip = [UV, "pip", "install", "--quiet", "--no-deps", "--python-version", "3.7", "--only-binary", ":all:"]
    subprocess.run([*pip, "--target", folder / "wheel", OLD_OPENSSL], check=True)
    for name in ("ssl", "crypto"):
        (library,) = (folder / "wheel/psycopg2/.libs").glob(f"lib{name}-*.so.1.0*")
        shutil.copy(library, folder / library.name)
        (folder / f"lib{name}.so.10").symlink_to(library.name)
    for library in (folder / "wheel/psycopg2/.libs").glob("*"):
        shutil.copy(library, folder / library.name)
    shim = folder / "shim.so"
    (folder / "shim.c").write_text(SHIM)
    (folder / "shim.map").write_text("GLIBC_PRIVATE { global: _dl_sym; };")
    version = f"-Wl,--version-script={folder / 'shim.map'}"
    subprocess.run([compiler, "-shared", "-fPIC", folder / "shim.c", "-o", shim, version, "-ldl"], check=True)
    environ = {"LD_PRELOAD": str(shim), "LD_LIBRARY_PATH": f"{folder}:{libraries}"}
    (folder / "environ.json").write_text(json.dumps(environ))


if __name__ == "__main__":
    main()
