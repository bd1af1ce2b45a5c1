"""JSON and YAML of strangers: a value, or one sentence; never another error, nor a dead process."""

import json
import math

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qaudit.support import lazy
from qaudit.support.foreign import json_of, yaml_of
from qaudit.support.keys import first_of

PLAIN = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
HARSH = [
    "a: 2026-02-30", "!!bool maybe", "&a [*a]", "!!python/name:os.system", "? [a]\n: b", "<<: 3",
    "1_0", "-1:59:59:59", "!!omap [a]", "!!set {a}", "!!binary x", "=", "%TAG ! x", "'", "\x00",
    "\ufeff", "\r\n", "9" * 5000, "0x" + "f" * 50, ".nan", "*a", "a: &a 1", "---", "{" * 50, "~",
    "\ud800",
]  # fmt: skip
parts = st.sampled_from([*HARSH, ": ", "\n", "  ", "- ", "[", "]", ","]) | st.text()
texts = st.lists(parts).map("".join)


YAML = [
    ("a: 1\nb:\n  4: 1\n  04: 2\n", "line 4: key `4` is there twice"),
    ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4: key `c` is there twice"),
    ("a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a\n", "line 4: key `<<` is there twice"),
    ("a: 2026-02-30\n", "line 1: `2026-02-30` is no date"),
    ("- 1\n- !!bool maybe\n", "line 2: `maybe` is no yes or no"),
    (f"a: {'1' * 5000}\n", "is no whole number"),
    ("a: &a [1, *a]\n", "line 1: an alias is inside of its own anchor"),
    (BOMB, "more than 100000 items"),
    ("[" * 100_000, "line 1: it nests deeper than 32"),
    ("a: " + "{a: " * 5000, "line 1: it nests deeper than 32"),
    ("#" * 1_000_001, "no file of keys is that long"),
    ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
    ("!!python/object/apply:os.system [true]\n", "line 1: could not determine a constructor"),
    ("a: \x07\n", "control characters are not allowed"),
    ("a: [\n", "line 2: did not find expected node content"),
]
JSON = [
    ('{"a": 1, "b": {"c": 1, "c": 2}}', "`c` is twice in one object"),
    ("[NaN]", "`NaN` is no number"),
    ("[-Infinity]", "`-Infinity` is no number"),
    ("[1e999]", "`1e999` is too large"),
    (f"[{'1' * 5000}]", "4300 digits"),
    ("[" * 100_000, "nests without end"),
    ("", "Expecting value"),
]


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [(read, *row) for read, rows in ((yaml_of, YAML), (json_of, JSON)) for row in rows],
    ids=range(len(YAML) + len(JSON)),
)
def test_what_is_wrong_is_one_line_that_names_the_place(read, text, said):
    with pytest.raises(ValueError) as refused:
        read(text)
    assert said in str(refused.value)
    if read is yaml_of:
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 250


@given(texts)
def test_any_text_is_yaml_or_refused_in_words(text):
    try:
        found = yaml_of(text)
    except ValueError as error:
        assert str(error)
    else:
        assert repr(found) == repr(yaml.load(text, Loader=PLAIN))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_yaml_of_other_editors_says_the_same_and_an_alias_lies_under_other_keys(ending, mark):
    assert yaml_of(f"{mark}a: &x [1]{ending}b: *x{ending}") == {"a": [1], "b": [1]}
    text = f"{mark}a: &a {{x: 1, y: 2}}{ending}b: {{<<: *a, y: 3}}{ending}"
    assert yaml_of(text)["b"] == {"x": 1, "y": 3}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _strict(value):
    if isinstance(value, dict):
        return all(map(_strict, value.values()))
    if isinstance(value, list):
        return all(map(_strict, value))
    return not isinstance(value, float) or math.isfinite(value)


@given(values, st.sampled_from(["", "\ufeff"]))
def test_json_comes_back_unless_it_is_none(value, mark):
    text = mark + json.dumps(value)
    if _strict(value):
        assert json_of(text) == value
    else:
        with pytest.raises(ValueError):
            json_of(text)


# --------------------------------------------------------------------------------------------------
# Names in sentences: the nearest one, and the first of many.


def test_the_first_names_are_quoted_and_the_others_counted():
    for names, most, text in (
        ("a", 3, "`a`"),
        ("abc", 3, "`a`, `b`, `c`"),
        ("abcd", 3, "`a`, `b`, `c` and 1 more"),
        ("abc", 1, "`a` and 2 more"),
    ):
        assert first_of([*names], most) == text


# --------------------------------------------------------------------------------------------------
# The lazy name of torch; `tests/house` holds that nothing is loaded before it is used.


def test_the_lazy_name_is_torch_itself_with_what_is_patched_in_it(monkeypatch):
    assert lazy.torch.nn is torch.nn
    assert isinstance(torch.zeros(2), lazy.Tensor) and not isinstance(2, lazy.Tensor)
    monkeypatch.setattr(torch, "zeros", lambda *size: "patched")
    assert lazy.torch.zeros(3) == "patched"
