"""What several commands' flags mean."""

from __future__ import annotations

from edl_runtime.errors import SpecError


def words(text: str) -> tuple[str, ...]:
    """Return what a flag lists, as in a,b."""
    return tuple(word for word in text.split(",") if word)


def parse_gpu_ids(text: str) -> tuple[int, ...]:
    """Return the GPUs in `--gpu_ids`; empty is the CPU. Raises SpecError."""
    if not all(word.isdecimal() for word in words(text)):
        raise SpecError("gpu_ids", text, "numbers, as in 0,1")
    return tuple(map(int, words(text)))
