"""What can run a stranger's program is refused by name, before anything is fetched."""

from __future__ import annotations

import re

import pytest

from qaudit import families
from qaudit.errors import UsageError
from qaudit.planning.survey import allowed_notes, refuse
from qaudit.types import Checkpoint, Ref


def checkpoint(label: str, *requires: str, repo: str = "org/name", family: str | None = None):
    return Checkpoint(Ref(repo, label), label, requires=requires, family=family)


def refusal(*checkpoints: Checkpoint, pickle: bool = False, code: bool = False) -> UsageError:
    with pytest.raises(UsageError) as caught:
        refuse(checkpoints, allow_pickle=pickle, trust_remote_code=code)
    assert caught.value.code == 2
    return caught.value


PLAIN, PICKLED = checkpoint("step1"), checkpoint("step2", "pickle")
CODED, BOTH = checkpoint("step3", "remote_code"), checkpoint("step4", "pickle", "remote_code")


PICKLES = "`step2` of `org/name` has its weights as pickles only, and opening a pickle can run code"
CODE = "`step3` of `org/name` has its model as code of its own, which is not run unless asked for"


@pytest.mark.parametrize(
    ("needing", "allowed", "message", "hint"),
    [
        (PICKLED, {}, PICKLES, "pass `--allow-pickle` if .* nothing but tensors"),
        (CODED, {}, CODE, "pass `--trust-remote-code` if .* with all your rights"),
        (BOTH, {}, "", "pass `--allow-pickle` `--trust-remote-code` if"),
        (BOTH, {"pickle": True}, "", "pass `--trust-remote-code` if"),
        (BOTH, {"code": True}, "", "pass `--allow-pickle` if"),
    ],
)
def test_what_is_not_allowed_yet_is_refused_with_the_flag_and_what_it_means(
    needing: Checkpoint, allowed: dict[str, bool], message: str, hint: str
) -> None:
    error = refusal(PLAIN, needing, **allowed)
    assert message in (error.message, "")
    assert re.match(hint, error.hint)
    refuse([PLAIN, needing], allow_pickle=True, trust_remote_code=True)
    refuse([PLAIN], allow_pickle=False, trust_remote_code=False)


def test_many_are_counted_and_one_is_named() -> None:
    error = refusal(*(checkpoint(f"step{k}", "pickle") for k in range(360)))
    assert error.message.startswith("`step0` of `org/name` (like 359 more) has")


@pytest.mark.parametrize(
    ("repo", "need", "said"),
    [
        ("LLM360/Amber", "pickle", "no revision was published as safetensors"),
        ("LLM360/Crystal", "pickle", "no revision was published as safetensors"),
        ("LLM360/Crystal", "remote_code", "written for transformers 4"),
        (
            "open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096",
            "remote_code",
            "written for transformers 4.49 to 4.57, which may not load with 5",
        ),
    ],
)
def test_a_family_says_why_in_its_own_words(repo: str, need: str, said: str) -> None:
    family = families.find(repo)
    assert family is not None
    assert need in family.requires
    needing = checkpoint("step", need, repo=repo, family=family.family)
    assert said in refusal(needing).message
    (note,) = allowed_notes([needing])
    assert said in note


def test_a_reason_belongs_to_what_is_required() -> None:
    for family in families.all_families():
        assert set(family.why_required) <= set(family.requires), family.family


def test_what_was_allowed_is_told() -> None:
    pickled, coded = allowed_notes([PLAIN, PICKLED, CODED])
    assert pickled.startswith("`step2` of `org/name`: pickled weights are read")
    assert coded == "`step3` of `org/name`: code of the repository is run on this machine"
    assert allowed_notes([PLAIN]) == ()


def test_a_family_that_nobody_ships_has_nothing_to_add() -> None:
    assert "()" not in refusal(checkpoint("a", "pickle", family="nobody's")).message
