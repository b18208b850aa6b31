"""What a reader is given, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from edl_runtime.distill.cache import AnswerCache
from edl_runtime.distill.engine import Question
from edl_runtime.distill.formats import Format
from edl_runtime.distill.teachers import Discovered, Fixed, teachers_from
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import Normalise, TopK
from edl_runtime.settings import RuntimeSettings

Source = Callable[[], Iterable[Any]] | Iterable[Any]
Teachers = Fixed | Discovered
Outputs = Sequence[str | TopK]


def checked_source(source: object) -> Callable[[], Iterable[Any]]:
    """Return what makes an iterable for each epoch. Raises SpecError."""
    if callable(source):
        return source
    if isinstance(source, Iterator):
        raise SpecError("source", type(source).__name__, "a function that returns a new one for each epoch")
    if not isinstance(source, Iterable):
        raise SpecError("source", type(source).__name__, "a function that returns an iterable, or a list of items")
    return source.__iter__


def checked_inputs(inputs: object) -> tuple[str | None, ...]:
    """Return the names of an item's slots. Raises SpecError."""
    allowed = "a list of names, one for each slot of an item, None for one without"
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise SpecError("inputs", inputs, allowed)
    names = [name for name in inputs if name is not None]
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise SpecError("inputs", inputs, f"{allowed}; at least one name, none twice")
    return tuple(inputs)


def checked_questions(
    teachers: Teachers | Mapping[str, Teachers] | None,
    outputs: Outputs | Mapping[str, Outputs],
    settings: RuntimeSettings,
) -> tuple[list[Question], tuple[str, ...]]:
    """Return what is asked of each pool, and the pools' names if they have any. Raises SpecError."""
    if not isinstance(teachers, Mapping):
        if isinstance(outputs, Mapping):
            allowed = "a list of outputs; by the names of several teachers only when `teachers` has names"
            raise SpecError("outputs", dict(outputs), allowed)
        asked = teachers_from(settings) if teachers is None else teachers
        return [Question(_checked_teachers("teachers", asked, settings), _checked_outputs("outputs", outputs))], ()
    names = tuple(teachers)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise SpecError("teachers", names, "at least one name with its Fixed(…) or Discovered(…)")
    if not isinstance(outputs, Mapping) or outputs.keys() != teachers.keys():
        given = list(outputs) if isinstance(outputs, Mapping) else outputs
        raise SpecError("outputs", given, f"a list of outputs for each of the teachers {', '.join(names)}")
    return [
        Question(
            _checked_teachers(f"teachers[{name!r}]", asked, settings),
            _checked_outputs(f"outputs[{name!r}]", outputs[name]),
        )
        for name, asked in teachers.items()
    ], names


def checked_normalise(normalise: object, inputs: Sequence[str | None]) -> dict[str, Normalise]:
    """Return what the teachers are to make of uint8 inputs. Raises SpecError."""
    if not isinstance(normalise, Mapping) or not all(isinstance(how, Normalise) for how in normalise.values()):
        raise SpecError("normalise", normalise, "Normalise(…) by the name of an input")
    for name in normalise:
        if name not in inputs:
            raise SpecError("normalise", name, f"a name of `inputs`: {', '.join(name for name in inputs if name)}")
    return dict(normalise)


def checked_cache(cache: object, inputs: Sequence[str | None]) -> AnswerCache | None:
    """Return the cache, if one is wished for. Raises SpecError."""
    if cache is None:
        return None
    if not isinstance(cache, AnswerCache):
        raise SpecError("cache", cache, "AnswerCache(…), or None to ask about each sample in each epoch")
    if cache.sample_id not in inputs:
        allowed = f"a name of `inputs`: {', '.join(name for name in inputs if name)}"
        raise SpecError("cache.sample_id", cache.sample_id, allowed)
    return cache


def checked_format(given: Format) -> Format:
    """Return `given` if it is a format. Raises SpecError."""
    if given not in get_args(Format):
        raise SpecError("format", given, " or ".join(map(repr, get_args(Format))))
    return given


def checked_count(field: str, given: object) -> int:
    """Return `given` if it is a whole number above 0. Raises SpecError that names `field`."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise SpecError(field, given, "a whole number of 1 or more")
    return given


def checked_flag(field: str, given: object) -> bool:
    """Return `given` if it is True or False. Raises SpecError that names `field`."""
    if not isinstance(given, bool):
        raise SpecError(field, given, "True or False")
    return given


def _checked_outputs(field: str, outputs: object) -> tuple[str | TopK, ...]:
    allowed = "a list of one or more of the model's outputs, names or TopK(name, k), none twice"
    if isinstance(outputs, str) or not isinstance(outputs, Sequence) or not outputs:
        raise SpecError(field, outputs, allowed)
    names = [output.name if isinstance(output, TopK) else output for output in outputs]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise SpecError(field, outputs, allowed)
    return tuple(outputs)


def _checked_teachers(field: str, given: object, settings: RuntimeSettings) -> Teachers:
    if not isinstance(given, Fixed | Discovered):
        raise SpecError(field, given, "Fixed(…), Discovered(…) or None for what the environment says")
    if isinstance(given, Discovered) and not settings.redis_url and not settings.discovery_url:
        allowed = "the URL of the Redis that knows the pool's teachers, or of an `edl discovery` in EDL_DISCOVERY_URL"
        raise SpecError("settings.redis_url (EDL_REDIS_URL)", "", allowed)
    return given
