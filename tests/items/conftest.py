"""Toy data of the twelve tasks, and tokenizers, for every test of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.support import toys
from tests.support.models import VOCABULARY, text

SUBJECTS = ("anatomy", "virology")
TASKS = (*toys.DATA, "pubmedqa", *(f"mmlu_{name}" for name in SUBJECTS))
"""Every shape of the twelve tasks; of MMLU two subjects, as tasks of their own."""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of data sets, as org/name."""
    return toys.write(tmp_path_factory.mktemp("data"), SUBJECTS, documents=6)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "qaudit"))


def tokenizer(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    """Return a small tokenizer, with or without BOS before every text."""
    trained = ByteLevelBPETokenizer()
    lines = [" ".join(toys.WORDS), *(text(seed) for seed in range(20))]
    special = ["<s>", "</s>"]
    trained.train_from_iterator(
        lines, vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    inner = trained._tokenizer
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
