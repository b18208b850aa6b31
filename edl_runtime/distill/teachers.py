"""Which teachers a student asks."""

from __future__ import annotations

from typing import Self

import msgspec

from edl_runtime.distill.standins import check_address
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import check_name


class Fixed(msgspec.Struct, frozen=True):
    """Teachers at known addresses, "host:port" each, or what `standins` has in place of one; no Redis needed.

    Raises SpecError.
    """

    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        given: object = self.addresses  # whatever a user gave, a string among it
        if not isinstance(given, list | tuple) or not given:
            raise SpecError("teachers.addresses", given, "one or more of 'host:port'")
        for address in given:
            check_address(address, "teachers.addresses")
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
        most: object = self.at_most
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise SpecError("teachers.at_most", most, "a whole number of 1 or more, or None for any")

    def __str__(self) -> str:
        return self.pool


def teachers_from(settings: RuntimeSettings) -> Fixed | Discovered:
    """Return the teachers that the environment names: EDL_TEACHERS, else EDL_POOL. Raises SpecError for neither."""
    if settings.teachers:
        return Fixed.parse(settings.teachers)
    if settings.pool:
        return Discovered(settings.pool)
    raise SpecError("teachers", None, "Fixed(…) or Discovered(…), or EDL_TEACHERS or EDL_POOL in the environment")
