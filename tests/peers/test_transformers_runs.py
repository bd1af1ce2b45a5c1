"""Exports with 135M parameters in transformers, and one in lm-eval: the losses of the audit."""

import json
from pathlib import Path

import numpy as np
import pytest

from qaudit.saved.evidence import read_saved
from tests.support.runtimes import REAL, place_with, verified

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("without_pictures")]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(place_with(tmp_path, **REAL))
    return tmp_path


def test_compressed_tensors_run_as_audited_there_and_in_lm_eval(qaudit, place):
    from lm_eval.models.huggingface import HFLM

    run = verified(qaudit, "compressed-tensors", "gptq-4bit:group=64")
    assert abs(run["difference"]) < 1e-6
    saved = read_saved(Path("out"))
    (measured,) = (row for row in saved.measurements if row.spec.startswith("gptq"))
    model = HFLM(pretrained="new", dtype="float32", device="cpu", batch_size=1)
    lines = Path("evaluation.jsonl").read_text().splitlines()
    documents = [model.tok_encode(json.loads(line)["text"]) for line in lines]
    # A document that fits the context is one window, whose first token nothing predicts.
    assert [len(ids) - 1 for ids in documents] == measured.evidence.tokens.tolist()
    asked = [(("", str(number)), ids[:1], ids[1:]) for number, ids in enumerate(documents)]
    theirs = [-answer[0] for answer in model._loglikelihood_tokens(asked, disable_tqdm=True)]
    # Sums of about 40 losses in float32.
    np.testing.assert_allclose(theirs, measured.evidence.nll_sum, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["bnb-nf4", "bnb-int8"])
def test_bitsandbytes_runs_as_audited(qaudit, place, scheme):
    run = verified(qaudit, "bnb", scheme)
    # Its kernels round to bfloat16 where the processor multiplies that.
    assert abs(run["difference"]) < 2.5e-3
