"""The resident way, held against the stream where both can run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.resident import NOTE, run_resident
from qaudit.engine.tokens import REFERENCE
from qaudit.errors import ModelError
from qaudit.model.skeleton import load_whole
from qaudit.types import FULL_PRECISION
from tests.support.passes import feed, losses, run

SCHEMES = "rtn-4bit:group=32,bnb-nf4,bnb-int8"


def resident(folder, schemes, given=None):
    model = load_whole(folder, WeightFolder(folder), torch.float32)
    given = given or feed()
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


def test_caches_are_refused_by_name(checkpoint):
    with pytest.raises(ModelError, match="`rtn-4bit:kv=int8` rounds keys and values") as refused:
        resident(checkpoint, "rtn-4bit:kv=int8")
    assert "kv=int8" in refused.value.hint


def test_weights_are_put_back(checkpoint):
    once, _ = resident(checkpoint, "rtn-2bit:group=32,rtn-8bit:group=32")
    alone, _ = resident(checkpoint, "rtn-8bit:group=32")
    spec = list(alone)[1]
    assert np.array_equal(once[spec], alone[spec])


def test_schemes_are_compared_where_full_precision_is_no_measurement(checkpoint):
    _, alone = resident(checkpoint, "rtn-3bit:group=32", replace(feed(), full_precision=False))
    _, both = resident(checkpoint, "rtn-3bit:group=32")
    for one, two in zip(alone.values(), both.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.nll, two.nll, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one.kl, two.kl, strict=True))


def test_a_perturbed_pass_is_compared_with_what_is_unperturbed(checkpoint, tmp_path):
    schemes = "rtn-3bit:group=32,gptq-3bit:group=32"
    given = replace(feed(), perturbed=True)
    plain, tallies = resident(checkpoint, schemes)
    moved, other = resident(checkpoint, schemes, given)
    streamed, stream = run(checkpoint, schemes, tmp_path, given=given)
    (rtn, gptq) = list(plain)[1:]
    np.testing.assert_array_equal(moved[REFERENCE], plain[FULL_PRECISION])
    np.testing.assert_allclose(streamed[REFERENCE], plain[FULL_PRECISION], rtol=2e-6)
    assert not np.array_equal(moved[FULL_PRECISION], plain[FULL_PRECISION])
    np.testing.assert_allclose(moved[FULL_PRECISION], plain[FULL_PRECISION], rtol=1e-5)
    np.testing.assert_allclose(moved[rtn], plain[rtn], rtol=1e-5)
    for tally in (other[FULL_PRECISION], stream[FULL_PRECISION]):
        floor = torch.cat([part.flatten() for part in tally.kl])
        assert 0 < floor.mean() < 1e-9
    # What a scheme is compared with is unperturbed, and so is what its KL divergence is of.
    for one, two in zip(tallies[rtn].kl, other[rtn].kl, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-2, atol=1e-6)
    assert not np.array_equal(moved[gptq], plain[gptq])
