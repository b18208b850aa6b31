"""`edl convert`: real processes, on this machine's disk and in an object store."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object_store import files, harm
from support.teachers.process import wait_until

from edl_runtime.shards.convert import convert as convert_samples
from edl_runtime.shards.dataset import list_shards, read_shard
from edl_runtime.shards.errors import ConversionRunningError, DamagedShardError, UnfinishedDatasetError

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

READER = """
import os, time
import numpy as np

def samples(count):
    rng = np.random.default_rng(0)
    return ((rng.random((20, 20), np.float32), f"picture {number}", number % 10) for number in range(count))

def train():
    return samples(330)

def slow():
    yield from samples(150)
    open("reached", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)

def one_of_many():
    yield from ((os.getpid(),) for _ in range(150))
    open(f"reached-{os.getpid()}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    yield from ((os.getpid(),) for _ in range(150))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reader.py").write_text(READER)
    return tmp_path


@pytest.fixture(params=["disk", "s3"])
def out(request: pytest.FixtureRequest, folder: Path) -> str:
    """A place for shards."""
    return f"{request.getfixturevalue('bucket')}/train" if request.param == "s3" else str(folder / "out")


def command(*words: str, main: str = "from edl_runtime.cli import main; main()") -> list[str]:
    return [sys.executable, "-P", "-c", main, "convert", *words, "--records-per-shard", "100"]


def convert(folder: Path, *words: str, main: str = "") -> subprocess.CompletedProcess[str]:
    asked = command(*words, main=main) if main else command(*words)
    return subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)


def contents(out: str) -> list[str]:
    """Return the names of all files at a place."""
    if out.startswith("s3://"):
        return sorted(path.rpartition("/")[2] for path in files().find(out))
    return sorted(path.name for path in Path(out).iterdir())


def test_a_reader_becomes_shards(folder: Path, out: str) -> None:
    """With a bar that counts records and shards, and a line in the end; a shard with a flipped bit is found."""
    done = convert(folder, "reader.py:train", out)
    assert (done.returncode, done.stdout) == (0, f"330 records in 4 shards at {out}\n"), done.stderr
    assert "330 records in 4 shards" in done.stderr
    shards = list_shards(out)
    assert contents(out) == [*(shard.rpartition("/")[2] for shard in shards), "manifest.json"]
    records = [record for shard in shards for record in read_shard(shard)]
    assert [(name, label) for _, name, label in records] == [(f"picture {each}", each % 10) for each in range(330)]
    assert all(picture.shape == (20, 20) and picture.dtype == "float32" for picture, _, _ in records)

    store = files() if out.startswith("s3://") else None
    content = bytearray(store.cat_file(shards[1]) if store else Path(shards[1]).read_bytes())
    content[len(content) // 2] ^= 4
    store.pipe_file(shards[1], bytes(content)) if store else Path(shards[1]).write_bytes(content)
    with pytest.raises(DamagedShardError, match="do not have the checksum of its name"):
        next(read_shard(shards[1]))


def test_an_object_that_the_store_itself_finds_damaged_is_damage(bucket: str) -> None:
    """The client checks the store's own checksum before ours."""
    out = f"{bucket}/train"
    convert_samples(lambda: [(1,)], out, records_per_shard=1)
    first, *_ = list_shards(out)
    harm(first)
    with pytest.raises(DamagedShardError, match="the store's check sum differs"):
        next(read_shard(first))
    harm(f"{out}/manifest.json")
    with pytest.raises(UnfinishedDatasetError, match=r"manifest\.json: the store's check sum differs"):
        list_shards(out)


def test_a_killed_conversion_is_not_taken_for_a_whole_one(folder: Path, out: str) -> None:
    """Nothing can be listed, or the old set still; the next one starts over, and leaves only what it wrote itself."""
    for words in ((), ("--overwrite",)):
        with subprocess.Popen(command("reader.py:slow", out, *words), cwd=folder) as killed:
            wait_until((folder / "reached").exists)
            killed.kill()
        (folder / "reached").unlink()
        if words:
            assert [sample for shard in list_shards(out) for sample in read_shard(shard)] == [(1,)]
        else:
            with pytest.raises(UnfinishedDatasetError, match=r"no manifest\.json"):
                list_shards(out)
            convert_samples(lambda: [(1,)], out, records_per_shard=1)
            assert len(contents(out)) == 2
    assert convert(folder, "reader.py:train", out, "--overwrite").returncode == 0
    assert len(list_shards(out)) == 4
    assert len(contents(out)) == 5
    assert {path.name for path in folder.iterdir()} <= {"reader.py", "reached", "out", "__pycache__"}


@pytest.mark.parametrize("attempt", range(3))
def test_of_four_conversions_at_once_one_replaces_the_set(folder: Path, out: str, attempt: int) -> None:
    """The old set stays whole until then, and the others say that another one runs."""
    del attempt
    convert_samples(lambda: [(1,)], out, records_per_shard=1)
    asked = command("reader.py:one_of_many", out, "--overwrite")
    running = [subprocess.Popen(asked, cwd=folder, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    wait_until(lambda: all(each.poll() or (folder / f"reached-{each.pid}").exists() for each in running), 200)
    assert [sample for shard in list_shards(out) for sample in read_shard(shard)] == [(1,)]
    (folder / "go").touch()
    told = {each.pid: each.communicate()[1] for each in running}
    whole = [each.pid for each in running if not each.returncode]
    assert [sample for shard in list_shards(out) for sample in read_shard(shard)] == [(pid,) for pid in whole] * 300
    assert len(contents(out)) == 4
    for each in running:
        assert each.returncode in (0, 1)
        assert each.pid in whole or f"edl: another conversion writes shards to {out}; wait for" in told[each.pid]


def test_in_an_object_store_the_later_conversion_has_the_place(bucket: str) -> None:
    """The earlier one, which may have been killed, stops at its next shard, and removes nothing of the later one's."""
    out = f"{bucket}/train"

    convert_samples(lambda: [(0,)], out, records_per_shard=1)

    def disturbed() -> Iterator[tuple[int]]:
        yield (1,)
        convert_samples(lambda: [(1,), (2,)], out, records_per_shard=1, overwrite=True)
        yield (3,)

    with pytest.raises(ConversionRunningError):
        convert_samples(disturbed, out, records_per_shard=1, overwrite=True)
    assert [sample for shard in list_shards(out) for sample in read_shard(shard)] == [(1,), (2,)]
    assert len(contents(out)) == 3


def test_an_interrupted_conversion_leaves_nothing(folder: Path) -> None:
    """Ctrl-C ends it at once."""
    out = str(folder / "out")
    with subprocess.Popen(command("reader.py:slow", out), cwd=folder, stderr=subprocess.DEVNULL) as interrupted:
        wait_until((folder / "reached").exists)
        interrupted.send_signal(signal.SIGINT)
    assert interrupted.returncode
    assert {path.name for path in folder.iterdir()} <= {"reader.py", "reached", "__pycache__"}


def test_a_full_disk_leaves_nothing(folder: Path) -> None:
    """Here each file may have so many bytes only, which the kernel enforces by the same kind of error."""
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "from edl_runtime.cli import main; main()"
    )
    done = convert(folder, "reader.py:train", "out", main=limited)
    assert done.returncode == 1
    assert "edl: shards at out can't be written or read (OSError: [Errno 27] File too large" in done.stderr
    assert {path.name for path in folder.iterdir()} <= {"reader.py", "__pycache__"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reader.py:test", "out"], "edl: READER: got 'reader.py:test', allowed is FILE.py:FUNCTION"),
        (["reader.py:samples", "out"], "edl: reader: got 'samples', allowed is a function that can be called without"),
        (["reader.py:train", "."], "edl: OUT: got "),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, words: list[str], message: str) -> None:
    """In one line, with a status that is not tried again."""
    done = convert(folder, *words)
    assert done.returncode == 78
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_a_console_made_is_an_empty_one(bucket: str) -> None:
    """It is an object without content, whose name ends with a slash."""
    url = f"{bucket}/made"
    files().pipe_file(f"{url}/", b"")
    made = convert_samples(lambda: [(1,)], url, records_per_shard=1)
    assert contents(url)[-2:] == [*made.shards, "manifest.json"]
    assert list(read_shard(list_shards(url)[0])) == [(1,)]


def test_a_missing_bucket_is_an_error_that_names_it(folder: Path, bucket: str) -> None:
    """With the cause."""
    done = convert(folder, "reader.py:train", bucket.replace("bucket", "elsewhere", 1))
    assert done.returncode == 1
    assert "shards at s3://elsewhere/nightly can't be written or read (" in done.stderr
    assert "Traceback" not in done.stderr
