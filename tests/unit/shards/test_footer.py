"""The footer of a Parquet file, read without pyarrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edl_runtime.shards.convert import convert
from edl_runtime.shards.dataset import list_shards
from edl_runtime.shards.footer import ColumnSize, row_groups

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard of two row groups, with fields of each kind."""

    def samples() -> list[tuple[object, ...]]:
        return [(n, f"text {n}", [n] * (n % 9 + 1), np.full((3, 4), n, np.float32), 0.5, True) for n in range(1500)]

    convert(samples, str(tmp_path / "out"), records_per_shard=1500)
    return Path(list_shards(str(tmp_path / "out"))[0])


def test_it_says_what_pyarrow_says(shard: Path) -> None:
    """Of each row group and each of its columns."""
    metadata = pq.read_metadata(shard)
    found = list(row_groups(shard.read_bytes()))
    assert [records for records, _ in found] == [1000, 500]
    for number, (_, columns) in enumerate(found):
        told = [metadata.row_group(number).column(place) for place in range(metadata.num_columns)]
        assert columns == [ColumnSize(6, each.num_values, each.total_uncompressed_size) for each in told]
        assert {each.compression for each in told} == {"ZSTD"}


def test_what_is_no_footer_is_an_error(shard: Path) -> None:
    """Cut anywhere, nested without end, or with more elements than there are bytes."""
    content = shard.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8]
    others = [footer[:cut] for cut in range(0, length, 7)]
    others += [b"\x1c" * 5000, b"\x19\xf5" + b"\xff" * 8 + b"\x7f", b"\x16" + b"\xff" * 20, b"\x1d\x00", b""]
    for other in others:
        with pytest.raises((ValueError, LookupError, TypeError, RecursionError)):
            list(row_groups(other + len(other).to_bytes(4, "little") + b"PAR1"))
    for whole in (b"", content[:-1], b"\xff\xff\0\0PAR1"):
        with pytest.raises(ValueError, match=r"no Parquet file|longer than the file"):
            list(row_groups(whole))
