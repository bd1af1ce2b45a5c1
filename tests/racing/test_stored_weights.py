"""What a survivor of a race costs: quantized again, or from stored weights."""

from __future__ import annotations

import pytest

from qaudit.core.registry import parse_scheme
from qaudit.planning.sizes import Sizes
from qaudit.racing import stored_weights
from qaudit.racing.stored_weights import RoundPrice, price_round
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
    monkeypatch.setattr(stored_weights, "matmul_rate", lambda: 5e10)
    monkeypatch.setattr(stored_weights.psutil, "cpu_count", lambda: 1)


def priced(scheme: str, tokens: int = 128 * 2048, room: int = ROOM) -> RoundPrice:
    plan = sample.audit().plan
    return price_round(
        SIZES, parse_scheme(scheme), plan, calibration_tokens=tokens, room_nbytes=room
    )


def test_calibrating_a_large_model_again_is_dearer_than_its_weights_on_the_disk() -> None:
    assert priced("gptq-4bit").store
    assert priced("awq-4bit").store


def test_what_needs_no_calibration_is_quantized_again() -> None:
    price = priced("rtn-4bit")
    assert price.again_seconds == 0
    assert not price.store


def test_weights_that_the_disk_does_not_hold_are_not_stored_and_the_price_names_the_room() -> None:
    price = priced("gptq-4bit", room=10**9)
    assert not price.store
    assert "do not go on from stored weights" in str(price)
    assert "1.0 GB free" in str(price)


def test_the_text_has_both_prices() -> None:
    text = str(priced("gptq-4bit"))
    assert text.startswith("survivors go on from stored weights (about ")
    assert "of disk) and are not quantized again (about " in text
