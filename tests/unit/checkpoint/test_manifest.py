"""The manifest, and the names of folders."""

from __future__ import annotations

import msgspec
import pytest

from edl_runtime.checkpoint.manifest import FileRecord, Manifest, Position, is_name, new_name, position_of

MANIFEST = Manifest(
    format=1,
    generation=7,
    step=123,
    epoch=2,
    world_size=3,
    metrics={"loss": 0.5},
    created_at=1.5,
    files={"model.safetensors": FileRecord(8, 9)},
)


def test_a_manifest_is_read_as_it_was_written() -> None:
    """All of it."""
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST


def test_no_byte_of_it_can_be_another() -> None:
    """It has a check sum, too: a wrong metric or step is as bad as a wrong weight."""
    content = MANIFEST.encode()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        try:
            found = Manifest.decode(bytes(changed))
        except ValueError:
            continue
        assert found == MANIFEST


def test_no_part_of_it_is_one() -> None:
    """A torn manifest is none."""
    content = MANIFEST.encode()
    for length in range(len(content)):
        with pytest.raises(ValueError, match=r"."):
            Manifest.decode(content[:length])


def test_another_format_is_refused_by_its_number() -> None:
    """One of a later version may mean something else."""
    with pytest.raises(ValueError, match="format 2, this version reads format 1"):
        Manifest.decode(msgspec.structs.replace(MANIFEST, format=2).encode())


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.pkl", ""])
def test_files_lie_in_the_folder(file: str) -> None:
    """A manifest names no others."""
    with pytest.raises(ValueError, match="files of other names"):
        msgspec.structs.replace(MANIFEST, files={file: FileRecord(1, 1)})


def test_names_tell_the_position_and_no_two_are_alike() -> None:
    """Two writers of one step never share a folder."""
    position = Position(generation=7, step=123)
    first, second = new_name(position), new_name(position)
    assert first != second
    assert first.startswith("step-000000123-gen-000007-")
    assert position_of(first) == position_of(second) == position
    assert position_of(new_name(Position(0, 10**12))) == Position(0, 10**12)


@pytest.mark.parametrize("folder", ["", "logs", "step-5", ".step-000000123-gen-000007-0a1b2c3d.partial"])
def test_other_folders_are_no_checkpoints(folder: str) -> None:
    """They are somebody else's, or drafts."""
    assert not is_name(folder)
    with pytest.raises(ValueError, match="no checkpoint's name"):
        position_of(folder)


def test_a_later_generation_is_newer_whatever_its_step() -> None:
    """It went on from an earlier step after a loss."""
    assert Position(2, 10) > Position(1, 90)
