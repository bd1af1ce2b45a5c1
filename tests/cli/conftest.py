"""A tiny series on disk, text to measure it on, and the command line run in this process."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from qaudit.cli import main

VOCABULARY = 300
STEPS = (10, 200, 1000)  # as text they sort otherwise
WORDS = ("the", "quick", "fox", "jumps", "over", "a", "lazy", "dog", "while", "wizards", "box")


@dataclass(frozen=True)
class Outcome:
    """What a person sees of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


def refused(done: Outcome, code: int, sentence: str, hint: str) -> None:
    """Assert that a command was refused in words: what is wrong, what to do, and the exit code."""
    assert done.err.count("error: ") == 1, done.err
    said, _, advice = done.err.partition("error: ")[2].partition("hint: ")
    assert sentence in said
    assert hint in advice
    assert done.code == code


def text(seed: int, length: int = 24) -> str:
    """Return a document of a few known words."""
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def write_documents(path: Path, seeds: range) -> Path:
    """Write documents as JSON lines."""
    lines = [json.dumps({"text": text(seed)}) for seed in seeds]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def save_tokenizer(folder: Path, size: int = VOCABULARY) -> None:
    """Train a byte-level BPE tokenizer on a few strings and save it as checkpoints have it."""
    trained = ByteLevelBPETokenizer()
    corpus = [text(seed) for seed in range(40)]
    trained.train_from_iterator(corpus, vocab_size=size, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(folder)


def save_model(folder: Path, seed: int, family: str = "llama", **changes: object) -> Path:
    """Save a random model of two blocks, without a tokenizer."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**shape, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a series and its text. Read it; whoever breaks things uses `place`."""
    root = tmp_path_factory.mktemp("shipped")
    for seed, step in enumerate(STEPS):
        save_tokenizer(save_model(root / "series" / f"step{step}", seed))
    write_documents(root / "calibration.jsonl", range(100, 104))
    write_documents(root / "evaluation.jsonl", range(200, 212))
    return root


@pytest.fixture
def place(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a copy of the series and the text of one's own."""
    folder = tmp_path / "place"
    shutil.copytree(shipped, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def qaudit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Return a function that runs the command line with arguments, in this process."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["qaudit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        code = left.value.code
        assert "Traceback" not in said.err + said.out
        return Outcome(code if isinstance(code, int) else int(bool(code)), said.out, said.err)

    return run


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: pictures are two thirds of a tiny scan's time."""
    monkeypatch.setattr("qaudit.report.plots.draw", lambda audit, folder: None)


TEXT = ("--calibration", "calibration.jsonl", "--evaluation", "evaluation.jsonl")
QUICK = (*TEXT, "--schemes", "rtn-4bit", "--out", "out")


@pytest.fixture
def scan(place: Path, qaudit: Run) -> Run:
    """Return a function that scans in `place`, with one cheap scheme and short text."""

    def run(*arguments: object) -> Outcome:
        return qaudit("scan", *QUICK, *arguments)

    return run


def audit_of(folder: Path) -> dict[str, object]:
    """Read the audit in an output folder."""
    return json.loads((folder / "audit.json").read_text(encoding="utf-8"))
