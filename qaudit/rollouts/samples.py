"""Prompts in JSON lines; which samples of them are due, and how they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qaudit.errors import CorpusError
from qaudit.support.foreign import json_of
from qaudit.text.chat import MESSAGES, Chat
from qaudit.text.cutting import Tokenizer
from qaudit.text.rollouts import Rollout, Sampler
from qaudit.whole import read_regular

FIELD = "prompt"
_FORM = 'write {"prompt": "..."} or {"messages": [...]} on each line'


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens."""

    number: int  # of its line, from zero
    sha256: str  # of its text
    ids: tuple[int, ...]
    text: str = ""


def read_prompts(path: Path, tokenizer: Tokenizer, chat: Chat) -> tuple[Prompt, ...]:
    """Read a file of prompts; CorpusError names the line that is wrong."""
    try:
        lines = read_regular(path).decode().split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CorpusError(f"`{path}` cannot be read: {reason.lower()}", hint=_FORM) from error
    prompts = []
    for number, line in enumerate(line for line in lines if line.strip()):
        where = f"prompt {number} of `{path}`"
        value = _value(line, where)
        is_chat = MESSAGES in value
        text = chat.prompt(where, value) if is_chat else value.get(FIELD)
        if not isinstance(text, str) or not text:
            raise CorpusError(f"{where} has no text", hint=_FORM)
        try:
            sha256 = hashlib.sha256(text.encode()).hexdigest()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"{where} holds half a character",
                hint="a lone surrogate such as \\ud800 cannot be written as UTF-8: take it out",
            ) from error
        # A template writes the special tokens itself.
        ids = tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"]
        prompts.append(Prompt(number, sha256, tuple(ids), text))
        if not ids:
            raise CorpusError(f"{where} has no tokens", hint=_FORM)
    if not prompts:
        raise CorpusError(f"there is no prompt in `{path}`", hint=_FORM)
    return tuple(prompts)


def _value(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json_of(line)
    except ValueError as error:
        raise CorpusError(f"{where} cannot be read: {error}", hint=_FORM) from error
    if not isinstance(value, dict):
        raise CorpusError(f"{where} is no object", hint=_FORM)
    return value


@dataclass(frozen=True)
class DrawSettings:
    """How samples are drawn, and where they end."""

    sampler: Sampler
    seed: int
    max_tokens: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True)
class DueSample:
    """A sample that is to be written; greedy, or drawn with its own random numbers."""

    prompt: Prompt
    sample: int
    greedy: bool

    @property
    def key(self) -> tuple[int, int, bool]:
        return self.prompt.number, self.sample, self.greedy

    def rollout(self, new_ids: Sequence[int], *, finished: bool) -> Rollout:
        return Rollout(
            prompt=self.prompt.number,
            prompt_sha256=self.prompt.sha256,
            ids=self.prompt.ids,
            new_ids=tuple(new_ids),
            sample=self.sample,
            greedy=self.greedy,
            finished=finished,
        )

    def seed(self, seed: int) -> int:
        text = f"{seed} {self.prompt.sha256} {self.prompt.number} {self.sample}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
