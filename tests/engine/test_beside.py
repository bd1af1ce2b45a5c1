"""A pass over a model whose last two blocks read keys and values of the first two (Gemma 4)."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qaudit.core.registry import parse_schemes
from qaudit.diagnostics.sensitivity import Variant
from qaudit.diagnostics.sensitivity_measure import run_partly
from qaudit.engine import streams
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.streams import Surroundings
from qaudit.engine.tokens import Tokens
from qaudit.model.blocks import Block, Group
from qaudit.model.links import GIVEN, Arguments
from qaudit.types import FULL_PRECISION
from tests.support import released, tiny
from tests.support.filled import filled
from tests.support.passes import CPU, feed, losses, opened, plain_losses, plain_model, run, windows
from tests.support.pretended_device import pretended

SCHEMES = "rtn-3bit:group=32,gptq-3bit:group=32,gptaq-3bit:group=32,awq-3bit:group=32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("gemma4"), "gemma4_text")


@pytest.fixture(scope="module")
def in_memory(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run(folder, SCHEMES, tmp_path_factory.mktemp("spill"))[0]


@torch.no_grad()
def test_losses_in_full_precision_are_those_of_the_whole_model(
    folder: Path, in_memory: dict[str, np.ndarray]
) -> None:
    expected = plain_losses(plain_model(folder))
    np.testing.assert_allclose(in_memory[FULL_PRECISION], expected, rtol=1e-5)


@pytest.mark.parametrize("limit", [0, 60_000])
def test_spilling_changes_no_bit(
    folder: Path, in_memory: dict[str, np.ndarray], tmp_path: Path, limit: int
) -> None:
    spilled = run(folder, SCHEMES, tmp_path, limit=limit)[0]
    assert all(np.array_equal(spilled[name], values) for name, values in filled(in_memory.items()))
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_holds_a_part_has_the_numbers_of_the_cpu(
    folder: Path, in_memory: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with pretended():
        model = opened(folder, device="cuda")
        read, _ = run(model, SCHEMES, tmp_path, 60_000, device_limit=60_000)
    for name, expected in in_memory.items():
        np.testing.assert_array_equal(read[name], expected, err_msg=name)


def test_entering_a_block_for_each_group_changes_no_bit(
    folder: Path,
    in_memory: dict[str, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokens, "may_wait_inside", lambda *_: False)
    monkeypatch.setattr(streams, "groups_in_passing", None)
    returning = run(folder, SCHEMES, tmp_path)[0]
    assert all(
        np.array_equal(returning[name], values) for name, values in filled(in_memory.items())
    )


def test_items_read_the_keys_of_their_own_tokens(folder: Path, tmp_path: Path) -> None:
    items = [replace(window, scored_from=1) for window in windows(7, 1)]
    by_name, tallies = run(folder, "rtn-3bit", tmp_path, given=replace(feed(), items=(items,)))
    for name, tally in filled(tallies.items()):
        assert tally.options is not None
        np.testing.assert_allclose(tally.options[0], by_name[name], rtol=1e-5)


def test_a_perturbed_pass_hardly_differs(
    folder: Path, in_memory: dict[str, np.ndarray], tmp_path: Path
) -> None:
    moved = run(folder, "rtn-3bit:group=32", tmp_path, given=replace(feed(), perturbed=True))[0]
    for name in (FULL_PRECISION, next(name for name in in_memory if name.startswith("rtn"))):
        np.testing.assert_allclose(moved[name], in_memory[name], rtol=1e-4)
        assert not np.array_equal(moved[name], in_memory[name])


def test_keys_are_rounded_where_they_are_made(folder: Path, tmp_path: Path) -> None:
    (_, plain), (name, rounded) = run(folder, "rtn-8bit:kv=int4", tmp_path)[0].items()
    assert "kv=int4" in name
    assert 1e-6 < np.abs(rounded / plain - 1).max() < 0.1


def test_variants_of_a_part_share_what_a_model_makes_of_tokens(
    folder: Path, in_memory: dict[str, np.ndarray], tmp_path: Path
) -> None:
    (scheme,) = parse_schemes(["gptq-3bit"])
    untouched, given, model = Variant("role", "none", ()), feed(), opened(folder)
    with HiddenStates(tmp_path, 0, CPU) as states:
        tallies, _ = run_partly(model, given, scheme, [untouched], states, lambda *_: None)
    np.testing.assert_allclose(
        losses(given, tallies[untouched]), in_memory[FULL_PRECISION], rtol=1e-5
    )


def test_what_a_block_was_given_is_dropped_behind_it(folder: Path, tmp_path: Path) -> None:
    items = [replace(window, scored_from=1) for window in windows(2, 1)]
    fed = replace(feed(), items=(items,), reference=lambda _: opened(folder))
    schemes = parse_schemes(["gptq-3bit"])
    with HiddenStates(tmp_path, 10**9, CPU) as states:

        def first_of(stream: str) -> int:
            """Return the first block of which something is kept that was given to it."""
            names = (name.partition("\0") for name, *_ in states.listed())
            given = (name for of, _, name in names if of == f"given/{stream}")
            return min(
                (int(name.removeprefix(GIVEN).partition(".")[0]) for name in given), default=4
            )

        def drops(*streams: str) -> Callable[[int, int, str], None]:
            def progress(done: int, total: int, what: str) -> None:
                if done:  # a reference is embedded when its first block comes
                    assert {stream: first_of(stream) for stream in streams} == dict.fromkeys(
                        streams, done
                    )

            return progress

        embedded = ("calibration/embedded", "evaluation/embedded", "items/embedded")
        progress = drops(*embedded, "evaluation/reference/first")
        run_blocks(opened(folder), fed, schemes, states, progress)
        progress = drops("calibration/embedded", "evaluation/embedded")
        untouched = Variant("role", "none", ())
        run_partly(opened(folder), fed, schemes[0], [untouched], states, progress)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm_moe_dsa"])
def test_an_indexer_that_has_no_gradient_is_left_where_it_starts(
    family: str, tmp_path: Path
) -> None:
    folder = released.save(tmp_path / "model", family)
    full, learned = run(folder, "flatquant-4bit:steps=3", tmp_path)[0].values()
    assert 1e-6 < np.abs(learned / full - 1).max() < 0.1


class Attention(torch.nn.Module):
    """Reads what an earlier block left."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(
        self, hidden_BTD: torch.Tensor, earlier: torch.Tensor | UserDict[str, torch.Tensor]
    ) -> torch.Tensor:
        if isinstance(earlier, UserDict):
            earlier = sum(earlier.values(), torch.zeros(1))
        out_BTD: torch.Tensor = self.q(hidden_BTD) + self.k(hidden_BTD) + earlier
        return out_BTD


ZERO = torch.zeros(1)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (ZERO, ZERO.clone(), True),
        (ZERO, ZERO + 1, False),
        (UserDict(), UserDict(), True),
        (UserDict(keys=ZERO), UserDict(keys=ZERO), False),
    ],
    ids=["equal tensors", "other tensors", "empty stores", "stores"],
)
def test_a_module_that_reads_what_was_left_for_a_batch_is_not_run_on_another(
    first: Any, second: Any, same: bool
) -> None:
    module = torch.nn.ModuleDict({"attention": Attention()})
    group = Group("attention.q+attention.k", ("attention.q", "attention.k"))
    block = Block(0, module, (group,), (), lambda _: Arguments())
    around = Surroundings(block)
    with around.watched():
        for earlier in (first, second):
            module["attention"](torch.zeros(1, 2, 4), earlier)
    assert (around.of(group, lambda: ()) is not None) == same
