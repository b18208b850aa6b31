"""The interface of a model, and its options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, get_args

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


MOST_FIELDS = 10_000
"""How many fields of a file `check_protobuf` looks at."""


def check_protobuf(file: Path, options: ModelOptions) -> None:
    """Raise ModelError for a file that is no protobuf message, or is cut off. Reads only the heads of its fields."""
    with file.open("rb") as content:
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        for _ in range(MOST_FIELDS):
            at = content.tell()
            if at == size and at > 0:
                return
            if not _skip_field(content) or content.tell() > size:
                raise ModelError(options.model, f"{file.name} is damaged or cut off at byte {at:,} of {size:,}")


def _skip_field(content: BinaryIO) -> bool:
    """Move behind a protobuf field; return False if there is none."""
    tag = _varint(content)
    if tag is None or not tag >> 3:
        return False
    match tag & 7:
        case 0:
            return _varint(content) is not None
        case 1 | 5 as kind:
            content.seek(8 if kind == 1 else 4, os.SEEK_CUR)
            return True
        case 2 if (length := _varint(content)) is not None:
            content.seek(length, os.SEEK_CUR)
            return True
    return False


def _varint(content: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        if not (byte := content.read(1)):
            return None
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value & (1 << 63) - 1
    return None


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
