"""What a teacher serves: the interface of a model, and the options of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tensors import Array
from edl_runtime.specs import MAX_BATCH


class Model(Protocol):
    """A loaded model. Used by one thread."""

    @property
    def signature(self) -> ModelSignature:
        """What it takes and answers."""
        ...

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Return at least `outputs` for `inputs`, which fit the signature, are read-only and only valid meanwhile."""
        ...


NO_FILE = "there is no such file"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which model to serve and how.

    - `model`: a folder with a Paddle inference model, an `.onnx` file, or `package.module:function`.
    - `name`: the name it is served under.
    - `outputs`: the outputs to serve, empty for all; "logits=fetch_name_0" renames one.
    - `gpu_id`: the GPU to run on; None for CPU.
    - `mem_optim`: let Paddle reuse memory between layers.
    - `max_batch`: most rows of a run that answers several requests, which come while the model is busy; 1 for none.
    """

    model: str
    name: str = "teacher"
    outputs: tuple[str, ...] = ()
    gpu_id: int | None = None
    mem_optim: bool = False
    max_batch: int = MAX_BATCH


def digest_of(files: Iterable[Path]) -> str:
    """Name the content of a model's files; equal on every machine that has the same model."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
