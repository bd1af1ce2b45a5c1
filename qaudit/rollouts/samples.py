"""Which samples are due, and how they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from qaudit.rollouts.prompts import Prompt
from qaudit.text.rollouts import Rollout, Sampler


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
