"""Rollouts in a folder: what is written is read, with its roles, and any damage is one sentence."""

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from qaudit.errors import CorpusError
from qaudit.text.rollouts import (
    HEADER,
    LINES,
    Sampler,
    TokenMarker,
    line_of,
    must_be_new,
    must_read_alike,
    read_rollouts,
    roles_of,
    rollout_text,
    separable,
    text_of,
)
from qaudit.types import CALL, REASONING, ROLES, Window
from tests.support.rollouts import SAMPLES, written
from tests.support.texts import THINKING, chat_of, tokenizer


def test_what_is_written_is_read(tmp_path):
    assert written(tmp_path) == read_rollouts(tmp_path)
    assert [sample.mark for sample in SAMPLES] == [None, 1.0, 0.25]
    assert not Sampler(temperature=0.2, top_k=5, top_p=0.9).has_penalties
    assert Sampler(repetition_penalty=1.1).has_penalties


def refusal(folder):
    with pytest.raises(CorpusError) as caught:
        read_rollouts(folder)
    assert caught.value.hint
    return caught.value


def test_a_damaged_folder_or_a_sample_that_cannot_be_is_refused(tmp_path):
    header = written(tmp_path).header
    (tmp_path / HEADER).write_text(text_of(replace(header, format=2)))
    assert "format 2" in refusal(tmp_path).message
    written(tmp_path)
    lines = (tmp_path / LINES).read_bytes()
    (tmp_path / LINES).write_bytes(lines[: len(lines) // 2])
    assert "has the hash of" in refusal(tmp_path).message
    first = SAMPLES[0]
    for samples, wrong in (
        ((replace(first, ids=()),), "needs a prompt"),
        ((replace(first, new_ids=()),), "no token in `new_ids`"),
        *(((replace(first, new_ids=(token,)),), "no token id") for token in (-1, 2**31)),
        ((replace(first, prompt=-1),), "below zero"),
        ((first, first), "has sample 0 of prompt 0 again"),
    ):
        written(tmp_path, samples)
        written(tmp_path, samples)
        assert wrong in refusal(tmp_path).message
    # A field of another type is named.
    header = written(tmp_path).header
    line = json.dumps(json.loads(line_of(SAMPLES[0])) | {"new_ids": "text"}) + "\n"
    (tmp_path / LINES).write_text(line)
    sha256 = hashlib.sha256(line.encode()).hexdigest()
    (tmp_path / HEADER).write_text(text_of(replace(header, count=1, rollouts_sha256=sha256)))
    message = refusal(tmp_path).message
    assert "line 1" in message
    assert "`new_ids` is `text`; it must be a list" in message
    (tmp_path / HEADER).unlink()
    assert HEADER in refusal(tmp_path).message
    shutil.rmtree(tmp_path)
    assert "there is no folder" in refusal(tmp_path).message


def test_windows_score_what_was_written_and_others_are_refused(tmp_path):
    text = rollout_text(written(tmp_path), {"turn": (5,), "reasoning": ()})
    tokens = [window.tokens.tolist() for window in text.windows]
    assert tokens == [[1, 2, 3, 4, 5], [1, 2, 3], [1, 9]]
    assert [window.scored for window in text.windows] == [3, 1, 1]
    assert text.greedy.tolist() == [True, False, False]
    assert (text.ends, text.longest) == ((("turn", (5,)),), 5)
    rollouts = written(tmp_path)
    must_read_alike(rollouts, "rolls", "dd")
    with pytest.raises(CorpusError, match="the rollouts in `rolls` are tokens of another") as error:
        must_read_alike(rollouts, "rolls", "ee")
    assert "`org/model`" in error.value.hint
    prompt = tuple(range(10, 30))
    rollouts = written(tmp_path, [replace(SAMPLES[0], ids=prompt), SAMPLES[2]])
    other = Window(0, np.array([1, *prompt], dtype=np.int32))
    must_be_new(rollouts, "rolls", [other])
    shared = Window(1, np.array([*prompt, 7], dtype=np.int32))
    with pytest.raises(CorpusError, match="calibration begins with 1 of the prompts of `rolls`"):
        must_be_new(rollouts, "rolls", [other, shared])


THINK, CALLS = TokenMarker(REASONING, (1,), (2,)), TokenMarker(CALL, (3, 30, 4), ())


def test_markers_are_those_of_the_template_and_tell_roles(tmp_path):
    for prompt, new, wanted in (
        ((9,), (9, 9), "aa"),
        ((9,), (1, 9, 2, 9), "rrra"),
        ((9, 1, 9), (9, 2, 9), "rra"),  # the template begins the reasoning
        ((9, 1, 9, 2, 9), (9, 9), "aa"),  # and ends it, where none is wanted
        ((9, 1), (9, 9), "rr"),  # the limit of tokens cut it
        ((1, *(9,) * 20), (9, 2, 9), "rra"),
        ((9,), (9, 2, 9, 2), "rraa"),
        ((9,), (1, 9, 2, 9, 3, 30, 4, 9), "rrracccc"),
        ((9,), (3, 30, 9), "aaa"),
        ((9,), (1, 9, 2, 1, 9), "rrrrr"),
    ):
        roles = roles_of(prompt, new, (THINK, CALLS))
        assert "".join(ROLES[role][0] for role in roles) == wanted, (prompt, new)
    # Markers that other tokens may join tell nothing.
    assert separable((THINK,), ()) == (THINK,)
    assert separable((THINK, CALLS), {3, 4}) == (THINK, CALLS)
    assert separable((THINK, CALLS), {3}) == ()
    ids = tokenizer(None).convert_tokens_to_ids(["<think>", "</think>"])
    with chat_of(tmp_path, THINKING) as chat:
        assert chat.token_markers == (TokenMarker(REASONING, (ids[0],), (ids[1],)),)
    (tmp_path / "none").mkdir()
    with chat_of(tmp_path / "none", None) as chat:
        assert chat.token_markers == ()
