"""The text of manifests, whatever it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edl_runtime.compat.manifest_yaml import manifest_text, read_manifests
from edl_runtime.errors import SpecError
from edl_runtime.parsing import MAX_YAML_VALUES

LAUGHS = "\n".join(["a0: &a0 [x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
"""A text of some lines that stands for billions of values."""

REFUSED = [
    ("", "manifest: got 'nothing', allowed is YAML of one or more manifests"),
    ("---\n", "manifest: got 'nothing'"),
    ("a: [", 'manifest: got "line 1: expected the node content'),
    ("- 1", "manifest: got [1], allowed is a mapping"),
    ("{a: 1}\n--- 5", "document 2: manifest: got 5, allowed is a mapping"),
    ("{a: 1, b: 2, a: 3}", "manifest: got \"line 1: duplicate key 'a'\", allowed is YAML of"),
    ("1: 2", "manifest: got 1, allowed is field names that are text"),
    ("a: {1: 2}", "a: got 1, allowed is field names that are text"),
    ("a: {b: [1, .nan]}", "a.b[1]: got nan, allowed is text, a number"),
    ("a: 2026-01-31", "a: got datetime.date(2026, 1, 31), allowed is text, a number"),
    ("a: !!set {b}", "a: got {'b'}, allowed is text, a number"),
    ("a: 99999999999999999999", "a: got 99999999999999999999, allowed is text, a number"),
    ('a: "\\0"', "a: got '\\x00', allowed is text without null bytes"),
    ('a: "\\ud800"', "a: got '\\ud800', allowed is text without null bytes and surrogates"),
    ("a: !!bool maybe", "manifest: got \"KeyError: 'maybe'\", allowed is values that match their tags"),
    ("a: 2026-02-31", "manifest: got 'ValueError: day is out of range for month'"),
    ("a: !!timestamp x", 'manifest: got "AttributeError: '),
    ("a: !!python/object/apply:os.getcwd []", 'manifest: got "line 1: could not determine a constructor for the tag'),
    ("a: &a [*a]", "manifest: got 'line 1: more than 50 levels of values, aliases written out'"),
    ("{a: &a 1}\n--- &a [*a]", "manifest: got 'line 2: more than 50 levels of values, aliases written out'"),
    ("a: " + "[" * 1100, "manifest: got 'line 1: more than 50 levels of values, aliases written out'"),
    (LAUGHS, f"manifest: got 'line 5: more than {MAX_YAML_VALUES} values, aliases written out'"),
    ("{kind: List}", "items: got None, allowed is a list of one or more manifests"),
    ("{kind: List, items: [1]}", "items[0]: got 1, allowed is a manifest"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=[text[:20] for text, _ in REFUSED])
def test_what_is_no_manifest_is_refused(text: str, said: str) -> None:
    """The error names the place, and nothing runs, hangs or fills the memory meanwhile."""
    with pytest.raises(SpecError, match="^" + re.escape(said)):
        read_manifests(text)


def test_references_and_merged_mappings_are_what_they_stand_for() -> None:
    """As kubectl reads them."""
    text = "common: &common {a: 1, b: 2}\nother: {<<: *common, b: 3}"
    assert read_manifests(text) == [("", {"common": {"a": 1, "b": 2}, "other": {"a": 1, "b": 3}})]


@pytest.mark.parametrize(
    ("content", "said"), [(None, r"can be read \(No such file"), (b"\xff", "a file of text, in UTF-8")]
)
def test_a_file_that_can_not_be_read(tmp_path: Path, content: bytes | None, said: str) -> None:
    """The error names it."""
    file = tmp_path / "job.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=rf"job\.yaml', allowed is .*{said}"):
        manifest_text(file)
