"""Every scheme on shapes that are awkward for it: it works, or is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from qaudit.core.registry import parse_scheme
from qaudit.errors import ModelError, SourceError
from tests.support.awkward import NAMES, REFUSED, SHAPES, made, short
from tests.support.filled import filled
from tests.support.passes import run


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_scheme_works_alone_and_with_a_cache(shape, tmp_path):
    (tmp_path / "states").mkdir()
    taken = [short(name) for name in NAMES if (name, shape) not in REFUSED]
    cached = [f"{text}:kv=int4" for text in taken]
    folder = made(tmp_path / "model", shape)
    losses, tallies = run(folder, ",".join([*taken, *cached]), tmp_path / "states")
    for text in (*taken, *cached):
        spec = parse_scheme(text).spec
        assert np.isfinite(losses[spec]).all(), text
        assert not np.array_equal(losses[spec], losses["fp"]), text  # it is that scheme
        assert tallies[spec].bits > 0, text
    for text, other in filled(zip(taken, cached, strict=True)):
        plain, rounded = parse_scheme(text).spec, parse_scheme(other).spec
        assert not np.array_equal(losses[plain], losses[rounded]), text


@pytest.mark.parametrize(("name", "shape"), REFUSED)
def test_what_a_scheme_cannot_take_is_refused_by_name(name, shape, tmp_path):
    folder = made(tmp_path / "model", shape)
    with pytest.raises((SourceError, ModelError), match=REFUSED[name, shape]) as refused:
        run(folder, short(name), tmp_path / "states")
    assert f"`{name}" in f"{refused.value.message} {refused.value.hint}"
