"""A look at each step of any Paddle optimizer in this process, before it changes a parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Hook = Callable[[Any], None]

_hooks: list[Hook] = []


def before_each_step(hook: Hook) -> None:
    """Have `hook` called with each optimizer that is about to step, from now on. It may raise an error instead.

    Optimizers of Paddle have no such hook; this is on the one method by which all of them apply gradients, also in
    `minimize`.
    """
    import paddle

    kind: Any = paddle.optimizer.Optimizer
    _hooks.append(hook)
    own = kind._apply_optimize  # noqa: SLF001
    if getattr(own, "calls_hooks", False):
        return

    @functools.wraps(own)
    def apply(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        for each in _hooks:
            each(optimizer)
        return own(optimizer, *arguments, **options)

    apply.calls_hooks = True  # type: ignore[attr-defined]
    kind._apply_optimize = apply  # noqa: SLF001
