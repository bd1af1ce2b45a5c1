"""Rollouts in a folder, as they are written."""

import hashlib

from qaudit.text.rollouts import (
    HEADER,
    LINES,
    Rollout,
    RolloutHeader,
    Rollouts,
    Sampler,
    line_of,
    text_of,
)

SAMPLES = (
    Rollout(prompt=0, prompt_sha256="aa", ids=(1, 2), new_ids=(3, 4, 5), greedy=True),
    Rollout(prompt=0, prompt_sha256="aa", ids=(1, 2), new_ids=(3,), finished=True, correct=True),
    Rollout(prompt=1, prompt_sha256="bb", ids=(1,), new_ids=(9,), sample=1, score=0.25),
)


def written(folder, samples=SAMPLES, **header):
    """Write samples with their header."""
    lines = "".join(map(line_of, samples))
    values = {
        "format": 1,
        "target": "org/model",
        "revision": "main",
        "weights_sha256": "cc",
        "tokenizer_sha256": "dd",
        "sampler": Sampler(temperature=0.7, top_k=20),
        "seed": 0,
        "count": len(samples),
        "rollouts_sha256": hashlib.sha256(lines.encode()).hexdigest(),
        "end_ids": (5,),
    }
    made = RolloutHeader(**{**values, **header})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LINES).write_text(lines)
    (folder / HEADER).write_text(text_of(made))
    return Rollouts(made, tuple(samples))
