"""What a plan would take with `--quick` and with `--thorough`: the same subjects, other settings.

Documents are as long as those that were counted, or one window where none was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme
from qaudit.core.shipped import Shipped
from qaudit.planning.cost import seconds_range
from qaudit.planning.passes import Pricing, passes_of
from qaudit.planning.sizes import TextSize
from qaudit.settings import PRESETS, settings_of
from qaudit.types import PresetTime, Price, Recipe, Subject


def preset_times(
    recipe: Recipe,
    subjects: Sequence[Subject],
    schemes: Sequence[Scheme],
    pricing: Pricing,
    machine: tuple[str, str],
) -> Iterator[PresetTime]:
    if any(_follows(recipe, keys) for keys in PRESETS.values()):
        return
    device, dtype = machine
    for name, keys in PRESETS.items():
        changed = replace(recipe, **{k: v for k, v in keys.items() if _is_default(recipe, k)})
        if changed == recipe:
            continue
        files = [scheme for scheme in schemes if isinstance(scheme, Shipped)]
        repriced = replace(pricing, text=_text(pricing.text, recipe, changed))
        passes = passes_of(
            subjects, (*parse_schemes(changed.schemes), *files), changed.repeats or 1, repriced
        )
        work = sum((step.price for step in passes), Price()).flops
        chosen = dtype if changed.dtype == "auto" else changed.dtype
        yield PresetTime(name, *seconds_range(work, device, chosen))


def _follows(recipe: Recipe, keys: dict[str, object]) -> bool:
    return all(getattr(recipe, name) == value for name, value in keys.items())


def _is_default(recipe: Recipe, name: str) -> bool:
    return bool(getattr(recipe, name) == settings_of(Recipe)[name].default)


def _text(text: TextSize, recipe: Recipe, changed: Recipe) -> TextSize:
    def tokens(counted: int, documents: int, wanted: int) -> int:
        each = counted / max(1, documents)
        return round(wanted * min(each, changed.document_tokens or each))

    return replace(
        text,
        evaluation_tokens=tokens(
            text.evaluation_tokens, recipe.evaluation_documents, changed.evaluation_documents
        ),
        calibration_tokens=tokens(
            text.calibration_tokens, recipe.calibration_documents, changed.calibration_documents
        ),
    )
