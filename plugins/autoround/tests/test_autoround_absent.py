"""AutoRound where its library is not installed; with it: `test_autoround_peer.py`."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from qaudit.core.registry import parse_scheme, schemes
from qaudit.engine.doctor import examine
from qaudit.errors import OtherIdentityError, SchemeError, UsageError
from qaudit.planning.pin import NUMERICS, libraries, refuse_other_libraries
from qaudit.planning.prepare import make_plan
from qaudit.settings import Recipe
from qaudit.types import Pins
from tests.support.cli import refused

pytestmark = pytest.mark.skipif(
    "autoround" not in schemes(), reason="qaudit-autoround is not installed: make test installs it"
)


@pytest.fixture
def _without_the_library(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("qaudit.core.scheme.version", version)


@pytest.mark.usefixtures("_without_the_library")
@pytest.mark.parametrize("command", ["scan", "plan"])
def test_it_is_refused_before_anything_is_measured(command, qaudit, tmp_path):
    done = qaudit(
        command, "demo", "--schemes", "rtn-4bit,autoround-3bit", "--out", tmp_path / "out"
    )
    sentence = "`autoround-3bit` needs the library `auto-round`, which is not installed"
    refused(done, 4, sentence, "pip install 'qaudit-autoround', or leave autoround out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_without_the_library")
def test_the_doctor_names_the_extra(monkeypatch):
    monkeypatch.setattr("qaudit.engine.doctor._machine", lambda: iter(()))
    monkeypatch.setattr("qaudit.engine.doctor._schemes", lambda: iter(()))
    (fact,) = [fact for fact in examine() if fact.name == "auto-round"]
    assert fact.value == "not installed; only for the scheme `autoround`"
    assert fact.hint == "pip install 'qaudit-autoround'"


def test_the_version_of_its_library_is_pinned_only_where_it_computes(monkeypatch):
    monkeypatch.setattr("qaudit.planning.pin.version_of", {"auto-round": "0.16.1"}.get)
    assert "auto-round" not in libraries([parse_scheme("gptq-4bit")])
    pinned = libraries([parse_scheme("gptq-4bit"), parse_scheme("autoround-4bit")])
    assert pinned["auto-round"] == "0.16.1"
    pins = Pins(threads=1, libraries=pinned, numerics=NUMERICS, text_sha256=())
    refuse_other_libraries(pins)
    with pytest.raises(OtherIdentityError, match=r"auto-round 0.16.1 instead of 0.16.0"):
        refuse_other_libraries(replace(pins, libraries={**pinned, "auto-round": "0.16.0"}))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("autoround-8bit:sym=false", "no 8 bits with zero points"),
        ("autoround-4bit:iters=0", "0 steps are out of range"),
        ("autoround-9bit", "9 bits is out of range"),
        ("autoround-4bit:group=0", "a group of 0 columns"),
        ("autoround-4bit:scale_dtype=float16", "`float16` are not supported"),
        ("autoround", "needs bits"),
    ],
)
def test_parameters_out_of_range_are_refused(text, sentence):
    with pytest.raises(SchemeError, match=sentence) as error:
        parse_scheme(text)
    assert error.value.hint


def test_a_scheme_that_learns_on_batches_of_its_own_takes_no_replayed_routing() -> None:
    recipe = Recipe(("nowhere",), schemes=("rtn-4bit", "autoround-4bit"), routing="reference")
    with pytest.raises(UsageError, match="`autoround-4bit` learns on other") as refused:
        make_plan(recipe)
    assert "leave `autoround-4bit` out" in refused.value.hint
