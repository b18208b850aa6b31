"""Which samples shards hold, and that they come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl_runtime.shards.convert import convert
from edl_runtime.shards.dataset import list_shards, read_shard
from edl_runtime.shards.errors import SampleError

pytest.importorskip("pyarrow")

SAMPLE = (
    7,
    -(2**63),
    0.1,
    float("inf"),
    True,
    "Gänse\0füßchen",
    b"\x00\xff",
    [3, 1, 2],
    ["a", ""],
    np.float32(0.5),
    np.int8(-3),
    np.float16(2),
    np.bool_(1),
    np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    np.arange(6, dtype=">i4").reshape(2, 3).T,
    np.array([True, False]),
    np.array([2.5], np.float16),
)
OTHER = tuple(np.zeros_like(value)[()] if isinstance(value, np.ndarray | np.generic) else value for value in SAMPLE)


def there_and_back(folder: Path, samples: list[Any]) -> list[Any]:
    convert(lambda: iter(samples), str(folder / "out"), records_per_shard=100)
    return [sample for shard in list_shards(str(folder / "out")) for sample in read_shard(shard)]


def test_values_come_back_with_their_types(tmp_path: Path) -> None:
    """Python's, numpy's numbers and arrays, also of other byte orders and not contiguous ones."""
    found = there_and_back(tmp_path, [SAMPLE, OTHER, SAMPLE])
    for sample, wanted in zip(found, [SAMPLE, OTHER, SAMPLE], strict=True):
        assert list(map(type, sample)) == list(map(type, wanted))
        for value, other in zip(sample, wanted, strict=True):
            assert getattr(value, "dtype", None) == getattr(other, "dtype", None)
            np.testing.assert_array_equal(value, other)


def test_arrays_may_be_changed_in_place(tmp_path: Path) -> None:
    """As those that the reader made: scripts normalise in place, and no other sample changes."""
    ones = np.ones(3, np.float32)
    first, second = (sample[0] for sample in there_and_back(tmp_path, [(ones,), (ones,)]))
    first -= 1
    assert second.tolist() == [1, 1, 1]


@pytest.mark.slow
def test_the_largest_arrays_come_back(tmp_path: Path) -> None:
    """Though zeros are compressed 30,600 to 1."""
    (found,) = there_and_back(tmp_path, [(np.zeros(2**28 - 1, np.uint8),)])
    assert found[0].nbytes == 2**28 - 1


def test_what_would_not_be_decoded_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit, here a lower one, is of how much a file may grow; the reader's sample is named."""
    monkeypatch.setattr("edl_runtime.shards.dataset._CERTAIN_BYTES", 100_000)
    monkeypatch.setattr("edl_runtime.shards.dataset._MOST_TO_ONE", 1)
    message = (
        r"sample 1: got values that hardly differ, among the 1 samples from here on \(a row group has 160000 bytes"
    )
    with pytest.raises(SampleError, match=message):
        convert(lambda: [([0],), ([0] * 20_000,)], str(tmp_path / "out"), records_per_shard=1)
    assert list(tmp_path.iterdir()) == []


def test_lists_may_have_any_length(tmp_path: Path) -> None:
    """As a sentence's word ids; also none, but in the first sample."""
    samples = [([1, 2], "a"), ([], "b"), ([3] * 5000, "c")]
    assert there_and_back(tmp_path, samples) == samples


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([3], "sample 0: got int, allowed is a tuple"),
        ([()], "sample 0: got tuple, allowed is a tuple with a value"),
        ([(1, None)], "sample 0, field 1: got NoneType, allowed is bool, int"),
        ([(1, {"a": 1})], "sample 0, field 1: got dict"),
        ([(1, [1, "a"])], "sample 0, field 1: got list of int and str"),
        ([(1, [])], "sample 0, field 1: got an empty list"),
        ([(1, np.array(["a"]))], r"sample 0, field 1: got str\d* \[1\]"),
        ([(1, np.array([None]))], r"sample 0, field 1: got object \[1\]"),
        ([(1, np.zeros((2, 0)))], r"sample 0, field 1: got float64 \[2, 0\]"),
        (
            [(1, np.broadcast_to(np.uint8(0), 2**28))],
            r"sample 0, field 1: got uint8 \[268435456\], .* less than 256 MiB",
        ),
        ([(1, np.longdouble(1))], r"sample 0, field 1: got longdouble"),
        ([(1, np.ma.masked_equal([1, 2], 2))], r"sample 0, field 1: got MaskedArray"),
        ([(1, 2), (1, 2, 3)], "sample 1: got 3 fields, allowed is 2 fields, as in sample 0"),
        ([(1, 2), 5], "sample 1: got int, allowed is 2 fields"),
        ([(1,), (1,), (2.0,)], "sample 2, field 0: got float, allowed is int, as in sample 0"),
        ([(1,), (True,)], "sample 1, field 0: got bool, allowed is int"),
        ([(1,), (np.int64(1),)], "sample 1, field 0: got a number of numpy, int64, allowed is int"),
        ([([1],), (["a"],)], "sample 1, field 0: got list of str, allowed is list of int"),
        ([(np.zeros(3),), (np.zeros(4),)], r"sample 1, field 0: got float64 \[4\], allowed is float64 \[3\]"),
        ([(np.zeros(3),), (np.zeros(3, "f4"),)], r"sample 1, field 0: got float32 \[3\], allowed is float64 \[3\]"),
        ([(1, 1), (1, 2**63)], "sample 1, field 1: got 9223372036854775808, allowed is what Arrow can hold as int64"),
        ([("a",), ("\ud800",)], r"sample 1, field 0: got '\\ud800', allowed is what Arrow can hold as string"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(tmp_path: Path, samples: list[Any], message: str) -> None:
    """With its number, its field, and what the first has; nothing is left."""
    with pytest.raises(SampleError, match=message):
        there_and_back(tmp_path, samples)
    assert list(tmp_path.iterdir()) == []


def test_samples_are_counted_over_all_shards(tmp_path: Path) -> None:
    """The number is the reader's, not the shard's."""

    def reader() -> Iterator[tuple[int]]:
        yield from ((number,) for number in range(2500))
        yield (2**64,)

    with pytest.raises(SampleError) as caught:
        convert(reader, str(tmp_path / "out"), records_per_shard=700)
    assert (caught.value.sample, caught.value.field) == (2500, 0)
    assert list(tmp_path.iterdir()) == []
