"""What the one pass holds, set against plain transformers (`benchmarks/memory.py` prints it)."""

import pytest

from benchmarks.memory import audit, make_model, plain


@pytest.mark.slow
def test_an_audit_needs_no_more_than_loading_the_model(tmp_path):
    make_model(tmp_path, layers=30)
    found = audit(tmp_path, tokens=4096)
    assert found["nbytes"] <= plain(tmp_path)
    assert found["nbytes"] <= found["estimate"] <= 3 * found["nbytes"]


@pytest.mark.slow
def test_memory_does_not_grow_with_depth(tmp_path):
    found = {}
    for layers in (12, 24):
        make_model(tmp_path / str(layers), layers)
        found[layers] = audit(tmp_path / str(layers), tokens=4096)["nbytes"]
    assert found[24] <= 1.1 * found[12]
