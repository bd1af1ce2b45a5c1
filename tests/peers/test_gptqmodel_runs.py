"""Exported GPTQ and AWQ files in GPTQModel: the weights that were measured, and their losses."""

import pytest

from tests.support.runtimes import REAL, place_with, snippet_of_export, verified

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("without_pictures")]


@pytest.mark.parametrize(
    ("form", "scheme", "shape"),
    [
        ("gptq", "rtn-4bit:group=32", {}),
        ("gptq", "rtn-3bit:group=32", {}),
        ("gptq", "rtn-8bit:group=32", {}),
        ("gptq", "rtn-4bit:group=32:sym=false", {}),
        ("gptq", "gptq-mix:budget=3.9:group=32:members=348", {}),
        ("awq", "rtn-4bit:group=32:sym=false", {}),
        pytest.param("gptq", "gptq-4bit:group=64", REAL, id="gptq-135M"),
        pytest.param("awq", "awq-4bit:group=64:exact_fold=true", REAL, id="awq-135M"),
    ],
)
def test_files_run_as_audited(qaudit, tmp_path, monkeypatch, form, scheme, shape):
    monkeypatch.chdir(place_with(tmp_path, **shape))
    run = verified(qaudit, form, scheme, "bfloat16")
    assert run["runtime"].startswith("gptqmodel 7.")
    # The same products in bfloat16, of the same weights, in batches of another shape.
    assert abs(run["difference"]) < 5e-4
    assert run["kl_running"] == pytest.approx(run["kl_audited"], rel=0.1)


@pytest.mark.parametrize(
    ("form", "scheme"), [("gptq", "gptq-4bit:group=32"), ("awq", "rtn-4bit:group=32:sym=false")]
)
def test_the_snippet_of_the_card_runs(qaudit, tmp_path, monkeypatch, capsys, form, scheme):
    monkeypatch.chdir(place_with(tmp_path))
    exec(snippet_of_export(qaudit, form, scheme), {})
    assert "quick brown fox" in capsys.readouterr().out
