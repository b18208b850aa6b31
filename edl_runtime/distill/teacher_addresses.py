"""Which teachers a student uses, and how it connects to them.

EDL_TEACHERS may hold, in place of network addresses:

| address | the answers come from |
| --- | --- |
| `inprocess:MODEL?outputs=…` | the model, in the student's own process |
| `recording:FOLDER@HOST:PORT` | that teacher, and are recorded in the folder |
| `recorded:FOLDER` | the folder |

Model and folder are quoted as in URLs. `edl compare` uses these to run one script in several ways.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, quote, unquote, urlencode

import msgspec
import numpy as np

from edl_runtime.errors import SpecError
from edl_runtime.external.address import ServerAddress, is_external
from edl_runtime.external.connection import connect as external
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.infer_messages import InferRequest
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK, positive_integer
from edl_runtime.protocol.tensors import Array, Tensor
from edl_runtime.protocol.tls import client_trust
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    from edl_runtime.distill.teacher_connections import Connect, InferenceConnection
    from edl_runtime.teacher.models.model import Model, ModelOptions


class Fixed(msgspec.Struct, frozen=True):
    """Teachers at known `addresses`, without Redis: "host:port", or another server's, "oip+http://host:port/model".

    Raises SpecError.
    """

    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        given: object = self.addresses  # may be a string, which is a sequence too
        if not isinstance(given, list | tuple) or not given:
            raise SpecError("teachers.addresses", given, "one or more of 'host:port'")
        for address in given:
            check_teacher_address(address, "teachers.addresses")
        msgspec.structs.force_setattr(self, "addresses", tuple(dict.fromkeys(given)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "host:port,host:port". Raises SpecError."""
        return cls(tuple(address.strip() for address in text.split(",") if address.strip()))

    def __str__(self) -> str:
        return ",".join(self.addresses)


class Discovered(msgspec.Struct, frozen=True):
    """The teachers that are registered in `pool`, as they come and go; `at_most` of them, None for any number.

    Raises SpecError.
    """

    pool: str
    at_most: int | None = None

    def __post_init__(self) -> None:
        check_name("teachers.pool", self.pool)
        if self.at_most is not None:
            most = positive_integer("teachers.at_most", self.at_most, ", or None for any")
            msgspec.structs.force_setattr(self, "at_most", most)

    def __str__(self) -> str:
        return self.pool


def teachers_from_settings(settings: RuntimeSettings) -> Fixed | Discovered:
    """Return the teachers that the environment names: EDL_TEACHERS, else EDL_POOL. Raises SpecError for neither."""
    if settings.teachers:
        return Fixed.parse(settings.teachers)
    if settings.pool:
        return Discovered(settings.pool)
    raise SpecError("teachers", None, "Fixed(…) or Discovered(…), or EDL_TEACHERS or EDL_POOL in the environment")


# Special addresses, and connections

_IN_PROCESS, _RECORDING, _RECORDED = _KINDS = ("inprocess:", "recording:", "recorded:")


def in_process_address(model: str, *, outputs: str = "", gpu_id: int | None = None, asked: Path | None = None) -> str:
    """Return the address of a model that the student's process runs; `outputs` and `gpu_id` as of `edl teacher`.

    `asked` is a file that is created once the model has answered.
    """
    more = {"outputs": outputs, "gpu_id": "" if gpu_id is None else str(gpu_id), "asked": asked or ""}
    return f"{_IN_PROCESS}{quote(model)}?{urlencode(more)}"


def recording_address(folder: Path, address: str) -> str:
    return f"{_RECORDING}{quote(str(folder))}@{address}"


def recorded_address(folder: Path) -> str:
    return f"{_RECORDED}{quote(str(folder))}"


def check_teacher_address(address: object, field: str) -> None:
    """Raise SpecError unless it is "host:port" or an address of the table above."""
    if isinstance(address, str) and is_external(address):
        ServerAddress.parse(address, field)
    elif not isinstance(address, str) or not address.startswith(_KINDS):
        endpoint_of(address, field)
    elif address.startswith(_RECORDING):
        endpoint_of(address.rpartition("@")[2], field)


def connection_factory(settings: RuntimeSettings) -> Connect:
    """Return a function that connects to an address with these settings. Raises SpecError."""
    trust = client_trust(settings)

    def teacher(address: str) -> TeacherConnection:
        limit_s = settings.teacher_timeout_s
        return TeacherConnection(address, token=settings.teacher_token, timeout_s=limit_s, trust=trust)

    def connect(address: str) -> InferenceConnection:
        kind, _, rest = address.partition(":")
        if is_external(address):
            return external(address, settings, trust=trust)
        if not address.startswith(_KINDS):
            return teacher(address)
        if kind == "inprocess":
            return _connect_in_process(address, rest)
        from edl_runtime.distill.offline import RecordedConnection

        if kind == "recorded":
            return RecordedConnection(Path(unquote(rest)))
        folder, _, recorded = rest.rpartition("@")
        return RecordedConnection(Path(unquote(folder)), teacher(recorded))

    return connect


def _connect_in_process(address: str, rest: str) -> InferenceConnection:
    from edl_runtime.teacher.models.model import ModelOptions

    model, _, query = rest.partition("?")
    more = {name: values[0] for name, values in parse_qs(query).items()}
    outputs = tuple(name for name in more.get("outputs", "").split(",") if name)
    gpu_id = int(more["gpu_id"]) if "gpu_id" in more else None
    asked = Path(more["asked"]) if "asked" in more else None
    return InProcessConnection(address, ModelOptions(model=unquote(model), outputs=outputs, gpu_id=gpu_id), asked)


# A model in the student's own process


class InProcessConnection:
    """Runs a model in this process in place of a teacher. All connections to one model share it, one at a time.

    `address` is its name in messages; `asked` a file to create when it has answered.
    """

    def __init__(self, address: str, options: ModelOptions, asked: Path | None = None) -> None:
        self._address = address
        self._options = options
        self._asked = asked

    def open(self) -> None:
        """Load the model, unless this process has loaded it. Raises ModelError."""
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
        alone: bool = False,  # noqa: ARG002 - every request is
    ) -> dict[str, Array]:
        """Return what a teacher would answer. Raises InferenceError, not retryable, when the model fails."""
        try:
            answers = self._shared.answer({name: np.asarray(rows) for name, rows in inputs.items()}, outputs, normalise)
        except Exception as error:
            reason = f"the model failed: {type(error).__name__}: {error}"
            raise InferenceError(self._address, 500, reason, retryable=False) from error
        if self._asked is not None:
            self._asked.touch()
            self._asked = None
        return answers


class _LoadedModel:
    def __init__(self, model: Model) -> None:
        from edl_runtime.teacher.predictor.execute import with_extensions

        self.signature = with_extensions(model.signature)
        self._model = model
        self._lock = threading.Lock()

    def answer(
        self, inputs: dict[str, Array], requested: Sequence[str | TopK], normalise: Mapping[str, Normalise]
    ) -> dict[str, Array]:
        from edl_runtime.teacher.predictor.execute import joined_inputs, needed_outputs, select_outputs

        request = InferRequest("", inputs, {}, tuple(requested), dict(normalise))
        with self._lock:
            outputs = self._model.run(joined_inputs([request], self.signature), needed_outputs([request]))
            # What the model gives is its own.
            return {name: np.array(tensor) for name, tensor in select_outputs(outputs, requested).items()}


@functools.lru_cache(maxsize=4)
def _load(options: ModelOptions) -> _LoadedModel:
    from edl_runtime.teacher.models.loading import load_model

    return _LoadedModel(load_model(options))


_loading = threading.Lock()


def _load_anew() -> None:
    """In a forked child, where a thread of the parent may have held any lock."""
    global _loading  # noqa: PLW0603
    _loading = threading.Lock()
    _load.cache_clear()


os.register_at_fork(after_in_child=_load_anew)


def _load_once(options: ModelOptions) -> _LoadedModel:
    with _loading:  # several connections come at once
        return _load(options)
