"""The resident way, held against the stream where both can run."""

import numpy as np
import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.resident import NOTE, run_resident
from qaudit.model.skeleton import load_whole
from qaudit.types import FULL_PRECISION
from tests.support.passes import feed, losses, run

SCHEMES = "rtn-4bit:group=32,bnb-nf4,bnb-int8"


def resident(folder, schemes):
    model = load_whole(folder, WeightFolder(folder), torch.float32)
    given = feed()
    tallies = run_resident(model, list(model.model.layers), given, parse_schemes([schemes]))
    return {name: losses(given, tally) for name, tally in tallies.items()}, tallies


def test_schemes_that_do_not_calibrate_agree_with_the_stream(checkpoint, tmp_path):
    whole, tallies = resident(checkpoint, SCHEMES)
    streamed, _ = run(checkpoint, SCHEMES, tmp_path)
    for name in whole:
        # int8 rounds activations, so that the last bit of one input can move a code
        rtol = 1e-3 if "int8" in name else 2e-6
        np.testing.assert_allclose(whole[name], streamed[name], rtol=rtol)
    assert all(NOTE in tally.notes for tally in tallies.values())


@pytest.mark.parametrize("text", ["gptq-3bit:group=32", "awq-3bit:group=32"])
def test_schemes_that_calibrate_come_near_the_stream(checkpoint, tmp_path, text):
    whole, _ = resident(checkpoint, f"rtn-3bit:group=32,{text}")
    streamed, _ = run(checkpoint, f"rtn-3bit:group=32,{text}", tmp_path)
    (rtn, spec) = list(whole)[1:]
    # Groups calibrated together move codes, so that only the size of the damage can agree.
    hurt = {
        k: abs(found[spec] - found[FULL_PRECISION]).sum()
        for k, found in (("w", whole), ("s", streamed))
    }
    scale = abs(streamed[rtn] - streamed[FULL_PRECISION]).sum()
    assert abs(hurt["w"] - hurt["s"]) < scale


def test_weights_are_put_back(checkpoint):
    once, _ = resident(checkpoint, "rtn-2bit:group=32,rtn-8bit:group=32")
    alone, _ = resident(checkpoint, "rtn-8bit:group=32")
    spec = list(alone)[1]
    assert np.array_equal(once[spec], alone[spec])
