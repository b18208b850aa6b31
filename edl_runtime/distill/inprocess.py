"""A teacher in the student's own process: no network, and no second process to do its work."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edl_runtime.errors import InferenceError
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK
from edl_runtime.protocol.requests import InferRequest
from edl_runtime.protocol.tensors import Array, Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from edl_runtime.teacher.models import Model, ModelOptions


class InProcessTeacher:
    """A connection of a reader that runs the model itself. All connections to one model share it, one at a time.

    `address` is what messages call it; `asked` a file to make when it has answered.
    """

    def __init__(self, address: str, options: ModelOptions, asked: Path | None = None) -> None:
        self._address = address
        self._options = options
        self._asked = asked

    def open(self) -> None:
        """Load the model, unless this process has. Raises ModelError."""
        self._shared = _load_once(self._options)

    def close(self) -> None:
        """The model stays, for the next connection."""

    def ready(self) -> bool:
        return True

    def signature(self) -> ModelSignature:
        return self._shared.signature

    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise],
        *,
        alone: bool = False,  # noqa: ARG002 - all are
    ) -> dict[str, Array]:
        """Return what a teacher would answer. Raises InferenceError when the model fails, which no other can mend."""
        try:
            answers = self._shared.answer({name: np.asarray(rows) for name, rows in inputs.items()}, outputs, normalise)
        except Exception as error:
            reason = f"the model failed: {type(error).__name__}: {error}"
            raise InferenceError(self._address, 500, reason, retryable=False) from error
        if self._asked is not None:
            self._asked.touch()
            self._asked = None
        return answers


class _Shared:
    def __init__(self, model: Model) -> None:
        from edl_runtime.teacher.answering import extended

        self.signature = extended(model.signature)
        self._model = model
        self._lock = threading.Lock()

    def answer(
        self, inputs: dict[str, Array], wishes: Sequence[str | TopK], normalise: Mapping[str, Normalise]
    ) -> dict[str, Array]:
        from edl_runtime.teacher.joining import joined_inputs, needed_outputs
        from edl_runtime.teacher.topk import wished

        request = InferRequest("", inputs, {}, tuple(wishes), dict(normalise))
        with self._lock:
            outputs = self._model.run(joined_inputs([request], self.signature), needed_outputs([request]))
            # What the model gives is its own.
            return {name: np.array(tensor) for name, tensor in wished(outputs, wishes).items()}


@functools.lru_cache(maxsize=4)
def _load(options: ModelOptions) -> _Shared:
    from edl_runtime.teacher.models import load_model

    return _Shared(load_model(options))


_loading = threading.Lock()


def _load_anew() -> None:
    """In a forked child, where a thread of the parent may have held any lock."""
    global _loading  # noqa: PLW0603
    _loading = threading.Lock()
    _load.cache_clear()


os.register_at_fork(after_in_child=_load_anew)


def _load_once(options: ModelOptions) -> _Shared:
    with _loading:  # several connections come at once
        return _load(options)
