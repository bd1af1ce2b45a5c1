"""Damage of saved documents: a value anywhere in them, or a byte."""

from hypothesis import strategies as st

ODD = [
    None, True, -1, 0.5, 2**70, 10**400, "", "../x", "/etc/passwd", "\x1b[2J", "x\0", "\ud800",
    "9", [], {}, [[]], {"a": 1},
]  # fmt: skip


def damaged(document, data):
    """Return a document with one value anywhere in it replaced."""
    holder = {"": document}
    inner = holder
    key = ""
    while isinstance(inner[key], dict | list) and inner[key] and data.draw(st.booleans()):
        inner = inner[key]
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
    inner[key] = data.draw(st.sampled_from(ODD))
    return holder[""]


def edited(content, data):
    """Return bytes with one of them replaced, removed or added, or cut there."""
    place = data.draw(st.integers(0, len(content) - 1))
    added = data.draw(st.binary(max_size=2))
    rest = content[place + data.draw(st.integers(0, 1)) :] if data.draw(st.booleans()) else b""
    return content[:place] + added + rest
