"""What may stand in EDL_TEACHERS in place of teachers on the network.

| address | the answers come from |
| --- | --- |
| `inprocess:MODEL?outputs=…` | the model, in the student's own process |
| `recording:FOLDER@HOST:PORT` | that teacher, and are kept in the folder |
| `recorded:FOLDER` | the folder |

Model and folder are quoted as in URLs. `edl compare` uses these to run one script in several ways.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlencode

from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.tls import trust_of
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from edl_runtime.distill.lane import Connect, Connection

_IN_PROCESS, _RECORDING, _RECORDED = _KINDS = ("inprocess:", "recording:", "recorded:")


def in_process(model: str, *, outputs: str = "", gpu_id: int | None = None, asked: Path | None = None) -> str:
    """Return the address of a model that the student's process runs; `outputs` and `gpu_id` as `edl teacher` has it.

    `asked` is a file that is there once the model has answered.
    """
    more = {"outputs": outputs, "gpu_id": "" if gpu_id is None else str(gpu_id), "asked": asked or ""}
    return f"{_IN_PROCESS}{quote(model)}?{urlencode(more)}"


def recording(folder: Path, address: str) -> str:
    """Return the address of a teacher whose answers are kept in `folder`."""
    return f"{_RECORDING}{quote(str(folder))}@{address}"


def recorded(folder: Path) -> str:
    """Return the address of the answers in `folder`."""
    return f"{_RECORDED}{quote(str(folder))}"


def check_address(address: object, field: str) -> None:
    """Raise SpecError unless it is "host:port" or one of the above."""
    if not isinstance(address, str) or not address.startswith(_KINDS):
        endpoint_of(address, field)
    elif address.startswith(_RECORDING):
        endpoint_of(address.rpartition("@")[2], field)


def connect_with(settings: RuntimeSettings) -> Connect:
    """Return what makes a connection to such an address, as students' settings have it. Raises SpecError."""
    trust = trust_of(settings)

    def teacher(address: str) -> TeacherConnection:
        limit_s = settings.teacher_timeout_s
        return TeacherConnection(address, token=settings.teacher_token, timeout_s=limit_s, trust=trust)

    def connect(address: str) -> Connection:
        kind, _, rest = address.partition(":")
        if not address.startswith(_KINDS):
            return teacher(address)
        if kind == "inprocess":
            return _in_process(address, rest)
        from edl_runtime.distill.offline import Recorded, Recorder

        if kind == "recorded":
            return Recorded(Path(unquote(rest)))
        folder, _, recorded_one = rest.rpartition("@")
        return Recorder(Path(unquote(folder)), teacher(recorded_one))

    return connect


def _in_process(address: str, rest: str) -> Connection:
    from edl_runtime.distill.inprocess import InProcessTeacher
    from edl_runtime.teacher.models import ModelOptions

    model, _, query = rest.partition("?")
    more = {name: values[0] for name, values in parse_qs(query).items()}
    outputs = tuple(word for word in more.get("outputs", "").split(",") if word)
    gpu_id = int(more["gpu_id"]) if "gpu_id" in more else None
    asked = Path(more["asked"]) if "asked" in more else None
    return InProcessTeacher(address, ModelOptions(model=unquote(model), outputs=outputs, gpu_id=gpu_id), asked)
