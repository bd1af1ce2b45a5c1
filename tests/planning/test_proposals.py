"""Soups that makers used and did not release, in a note of the plan."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from qaudit.planning.resolve import proposed_soups
from qaudit.types import Recipe
from tests.support.series import find_checkpoints

FAMILY = """
family: tiny
description: tiny
stages: [{name: end, pattern: 'end-(?P<ingredient>[0-9])-step(?P<step>[0-9]+)'}]
soups: [{label: main, TARGETof: [end-1-step9, end-2-step9]}]
"""


def test_a_soup_that_was_not_released_is_proposed_unless_soups_were_asked_for(
    tmp_path: Path,
) -> None:
    for seed in (1, 2):
        folder = tmp_path / f"end-{seed}-step9"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"a": torch.full((4,), float(seed))}, folder / "model.safetensors")
    family = tmp_path / "qaudit-family.yaml"
    family.write_text(FAMILY.replace("TARGET", ""))
    every = find_checkpoints(tmp_path)
    assert proposed_soups(Recipe((), ()), every) == (
        "the makers' soup of `end-1-step9` and `end-2-step9` can be measured too: "
        "`--soup 'main=mean(end-1-step9+end-2-step9)'`",
    )
    assert proposed_soups(Recipe((), (), soups=("last:2",)), every) == ()
    assert proposed_soups(Recipe((), ()), every[:1]) == ()
    family.write_text(FAMILY.replace("TARGET", "target: main, "))
    assert proposed_soups(Recipe((), ()), find_checkpoints(tmp_path)) == ()
