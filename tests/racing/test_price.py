"""What a survivor of a race costs: quantized again, or from weights that were kept."""

from __future__ import annotations

import pytest

from qaudit.core.registry import parse_scheme
from qaudit.planning.price import Sizes
from qaudit.racing import price as race_price
from qaudit.racing.price import GoingOn, price_going_on
from tests.support import sample

SIZES = Sizes(
    parameters=7 * 10**9,
    blocks=32,
    block_parameters=2 * 10**8,
    rest_parameters=6 * 10**8,
    hidden=4096,
    widest=11008,
    vocabulary=32000,
)
ROOM = 10**15


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_price, "matmul_rate", lambda: 5e10)
    monkeypatch.setattr(race_price.psutil, "cpu_count", lambda: 1)


def priced(scheme: str, tokens: int = 128 * 2048, room: int = ROOM) -> GoingOn:
    plan = sample.audit().plan
    return price_going_on(
        SIZES, parse_scheme(scheme), plan, calibration_tokens=tokens, room_nbytes=room
    )


def test_calibrating_a_large_model_again_is_dearer_than_its_weights_on_the_disk() -> None:
    assert priced("gptq-4bit").keep
    assert priced("awq-4bit").keep


def test_what_needs_no_calibration_is_quantized_again() -> None:
    found = priced("rtn-4bit")
    assert found.again_seconds == 0
    assert not found.keep


def test_weights_that_the_disk_does_not_hold_are_not_kept_and_that_is_said() -> None:
    found = priced("gptq-4bit", room=10**9)
    assert not found.keep
    assert "do not go on from kept weights" in str(found)
    assert "1.0 GB free" in str(found)


def test_both_prices_are_said() -> None:
    said = str(priced("gptq-4bit"))
    assert said.startswith("survivors go on from kept weights (about ")
    assert "of disk) and are not quantized again (about " in said
