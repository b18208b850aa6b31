"""The interface of a model, and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, get_args

import msgspec

from edl_runtime.protocol.oip import TOKENIZER_EXTENSION, TOKENIZER_FILES, Datatype, ModelSignature, digest_of
from edl_runtime.protocol.tensors import Array, dtype_of
from edl_runtime.specs import MAX_BATCH
from edl_runtime.teacher.errors import ModelError


class Model(Protocol):
    """A loaded model. Used by one thread."""

    @property
    def signature(self) -> ModelSignature:
        """Its inputs and outputs."""

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        """Return at least `outputs`. `inputs` fit the signature, are read-only and valid during the call only."""


DATATYPES: dict[str, Datatype] = {
    dtype_of(datatype).name: datatype for datatype in get_args(Datatype) if datatype not in ("BF16", "BYTES")
}
"""The protocol's datatypes by numpy's names."""

NO_FILE = "there is no such file"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The model to serve, and how.

    - `model`: a folder with a Paddle inference model, an `.onnx` file, or `package.module:function`.
    - `name`: the name it is served under.
    - `outputs`: the outputs to serve, empty for all; "logits=fetch_name_0" renames one.
    - `gpu_id`: the GPU to run on; None for CPU.
    - `mem_optim`: let Paddle reuse memory between layers.
    - `max_batch`: most rows of a run that joins several requests; 1 turns joining off.
    """

    model: str
    name: str = "teacher"
    outputs: tuple[str, ...] = ()
    gpu_id: int | None = None
    mem_optim: bool = False
    max_batch: int = MAX_BATCH


def tokenizer_in(folder: Path) -> tuple[str, ...]:
    """Return the extension that tells the digest of the tokenizer in a model's folder; none without such a file.

    Raises ModelError if it can't be read.
    """
    for file in (folder / name for name in TOKENIZER_FILES):
        if file.is_file():
            try:
                return (TOKENIZER_EXTENSION + digest_of([file]),)
            except OSError as error:
                raise ModelError(str(file), str(error)) from error
    return ()
