"""Errors of the protocol between students and teachers."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.errors import EdlError, clipped

MOST_TOLD = 2000
"""Most characters of an error that come from the network: they are logged."""


class TeacherError(EdlError):
    """Raised when a teacher can't serve."""


@dataclass(eq=False, repr=False)
class ModelNotReadyError(TeacherError):
    """Raised when a server that is not ours does not serve the model, perhaps not yet; `reason` has its words."""

    reason: str

    def __str__(self) -> str:
        return f"its model is not ready: {self.reason}"


class ProtocolError(EdlError):
    """Raised when bytes from the network are not what the protocol allows. Its text may have many of them."""

    def __str__(self) -> str:
        return clipped(super().__str__(), MOST_TOLD)


@dataclass(eq=False, repr=False)
class AnswerLimitError(ProtocolError):
    """Raised when a model's answer has more bytes than can be sent."""

    size: int
    limit: int

    def __str__(self) -> str:
        return (
            f"the answer has {self.size} bytes or more, allowed are {self.limit}; "
            "request fewer rows or outputs, and binary ones"
        )


@dataclass(eq=False, repr=False)
class InferenceError(TeacherError):
    """Raised when a teacher answers a request with an error.

    `retryable` is true when another teacher may answer it (this one drains, is overloaded or failed) and false when
    every teacher would refuse it (the request itself is wrong). `predictor_died` is true when the teacher's predictor
    died while it ran the request, which may be the cause. `reason` is cut behind `MOST_TOLD` characters.
    """

    address: str
    status: int
    reason: str
    retryable: bool
    predictor_died: bool = False

    def __post_init__(self) -> None:
        self.reason = clipped(self.reason, MOST_TOLD)
        super().__post_init__()

    def __str__(self) -> str:
        return f"teacher {self.address} answered {self.status}: {self.reason}"
