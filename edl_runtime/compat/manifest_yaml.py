"""Parses the YAML of manifests into plain data, as JSON has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edl_runtime.errors import SpecError
from edl_runtime.parsing import bounded_yaml_loader

_NO_TEXT = "YAML of one or more manifests, as for kubectl"


def manifest_text(path: Path) -> str:
    """Return the text of a file. Raises SpecError for one that can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError("manifest", str(path), f"a file that can be read ({error.strerror})") from None
    except ValueError:
        raise SpecError("manifest", str(path), "a file of text, in UTF-8") from None


def read_manifests(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return each manifest in `text`, with a prefix for error messages: empty for a single one.

    A List, as `kubectl get -o yaml` prints, stands for its items. Raises SpecError, also for values unknown to JSON.
    """
    documents = [document for document in _parsed(text) if document is not None]
    if not documents:
        raise SpecError("manifest", "nothing", _NO_TEXT)
    found: list[tuple[str, dict[str, Any]]] = []
    for number, document in enumerate(documents, 1):
        where = f"document {number}: " if len(documents) > 1 else ""
        manifest = _plain(where, document)
        if not isinstance(manifest, dict):
            raise SpecError(f"{where}manifest", manifest, "a mapping with apiVersion, kind, metadata and spec")
        found += _listed(where, manifest) if manifest.get("kind") == "List" else [(where, manifest)]
    return found


def _listed(where: str, manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    items = manifest.get("items")
    if not isinstance(items, list) or not items:
        raise SpecError(f"{where}items", items, "a list of one or more manifests")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise SpecError(f"{where}items[{number}]", item, "a manifest")
        yield f"{where}items[{number}].", item


def _parsed(text: str) -> list[Any]:
    import yaml

    class Loader(bounded_yaml_loader()):  # type: ignore[misc]
        """Refuses duplicate keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's
            if isinstance(node, yaml.MappingNode):
                names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {twice!r}", node.start_mark)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        return list(yaml.load_all(text, Loader=Loader))
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise SpecError("manifest", f"{line}{error.problem}", _NO_TEXT) from None
    except yaml.YAMLError as error:
        raise SpecError("manifest", " ".join(str(error).split()), _NO_TEXT) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML raises these for values that don't match their tag, as in "!!bool maybe" or 2026-02-31.
        raise SpecError("manifest", f"{type(error).__name__}: {error}", "values that match their tags") from None


def _plain(path: str, value: Any) -> Any:
    """Return the value if JSON can represent it. Raises SpecError."""
    if isinstance(value, dict):
        return {_plain_text(path, key): _plain(below(path, key), each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(f"{path}[{number}]", each) for number, each in enumerate(value)]
    if isinstance(value, str):
        return _plain_text(path, value)
    is_number = abs(value) < 2**63 if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)
    if value is None or is_number:
        return value
    raise SpecError(path, value, "text, a number, true or false, a list or a mapping; quote it to make it text")


def below(path: str, name: object) -> str:
    """Return the path of field `name` below `path`, for error messages."""
    return f"{path}{name}" if not path or path.endswith((" ", ".")) else f"{path}.{name}"


def _plain_text(path: str, text: object) -> str:
    if not isinstance(text, str):
        raise SpecError(path or "manifest", text, "field names that are text")
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text):
        raise SpecError(path or "manifest", text, "text without null bytes and surrogates")
    return text
