"""Policies of one's own, named as "package.module:function"."""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from edl_runtime.errors import SpecError

if TYPE_CHECKING:
    from edl_runtime.autoscale.plan import Policy

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_policy_name(name: object) -> None:
    """Raise SpecError for what can be no policy's name; whether there is such a function is not looked at."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise SpecError("policy", name, "'package.module:function', as text")


def policy_named(name: str) -> Policy:
    """Import the policy of that name. Raises SpecError for one that is not there, or no function."""
    check_policy_name(name)
    try:
        found: Policy = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise SpecError("policy", name, f"'package.module:function' that can be imported: {error}") from error
    if not callable(found):
        raise SpecError("policy", name, "a function, as `edl_runtime.autoscale.policy:decide`")
    return found
