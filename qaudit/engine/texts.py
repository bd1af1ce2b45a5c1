"""The text a plan asks for, read and cut once for all of its subjects.

Subjects can only be compared document by document if they read the same tokens, so that a scan
over several tokenizers is refused before any weights are read, not after.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qaudit.engine.corpus import build_corpus, load_tokenizer
from qaudit.engine.cutting import Tokenizer
from qaudit.engine.model.skeleton import read_config
from qaudit.engine.plan import make_protocol
from qaudit.engine.results import sha256_of
from qaudit.errors import SourceError, UsageError
from qaudit.sources.choices import read_choices
from qaudit.sources.places import folder_of
from qaudit.sources.text import text_of
from qaudit.types import Corpus, Plan, digest

_DECIDES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files of a tokenizer that decide how text becomes tokens."""


def read_corpus(plan: Plan) -> Corpus:
    """Read the text of a plan with the tokenizer its subjects share."""
    folders = {c.label: folder_of(c) for s in plan.subjects for c, _ in s.members}
    _must_share_a_tokenizer(folders)
    recipe = plan.recipe
    calibration_name, calibration = text_of(recipe.calibration, "calibration")
    evaluation_name, evaluation = text_of(recipe.evaluation, "evaluation")
    sources = [("calibration", calibration_name), ("evaluation", evaluation_name)]
    if recipe.choices:
        sources.append(("choices", recipe.choices))
    return build_corpus(
        calibration,
        evaluation,
        read_choices(recipe.choices) if recipe.choices else (),
        _tokenizer_of(list(folders.values())),
        make_protocol(recipe, plan.context),
        sources,
    )


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in _DECIDES if (folder / name).is_file()]


def _tokenizer_of(folders: Sequence[Path]) -> Tokenizer:
    """Load the first tokenizer there is: a checkpoint without one reads what the others read."""
    failures = []
    for folder in [f for f in folders if _tokenizer_files(f)] or folders[:1]:
        try:
            read_config(folder)  # the library wants it too, and says less of what is wrong there
            return load_tokenizer(folder)
        except SourceError as error:
            failures.append(error)
    raise failures[0]


def _must_share_a_tokenizer(folders: dict[str, Path]) -> None:
    seen: dict[str, str] = {}
    for label, folder in folders.items():
        if files := _tokenizer_files(folder):
            seen.setdefault(digest([(f.name, sha256_of(f)) for f in files]), label)
    if len(seen) > 1:
        a, b = list(seen.values())[:2]
        raise UsageError(
            f"`{a}` and `{b}` have different tokenizers: their documents cannot be compared",
            hint="scan them apart; across tokenizers compare bits per byte",
        )
