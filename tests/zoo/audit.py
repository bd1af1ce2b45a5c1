"""One type: made, saved, audited, and held against plain transformers."""

import re
import signal
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import Route
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.read_out import document_sums
from qaudit.engine.tasks import Machine
from qaudit.engine.tokens import Feed
from qaudit.errors import QauditError
from qaudit.model.skeleton import must_open
from qaudit.types import FULL_PRECISION, Window
from tests.support.tiny import header_sizes
from tests.zoo import reference, tiny

TOLERANCE = 1e-5
_CPU = torch.device("cpu")
_LENGTHS, _LONGEST = (40, 33, 40), 40
_RANDOM = np.random.default_rng(0)
_CALIBRATION = [Window(i, _RANDOM.integers(20, 2000, _LONGEST).astype(np.int32)) for i in range(64)]
_SCHEMES = ("rtn-4bit", "gptq-4bit")
_WINDOWS = [
    Window(i, _RANDOM.integers(20, 2000, n).astype(np.int32)) for i, n in enumerate(_LENGTHS)
]


def result_of(model_type, seconds=60):
    """Return how a type runs; whatever goes wrong is part of the result."""
    with tempfile.TemporaryDirectory() as temporary, _within(seconds):
        folder = Path(temporary) / "model"
        try:
            plain = tiny.save(folder, model_type).from_pretrained(folder, dtype=torch.float32)
            documents = [torch.from_numpy(w.tokens).long() for w in _WINDOWS]
            wanted = reference.losses(plain.eval(), documents)
            if not np.isfinite(wanted).all():
                raise ValueError("plain transformers return no finite loss")
        except Exception as error:  # noqa: BLE001 - a type that cannot be made is not tried
            return {"runs": "not tried", "reason": line_of(error, folder)}
        early = ""
        try:
            early = _must_open(folder)
            tallies = _audit(folder, Path(temporary))
            result = _compared(plain, documents, wanted, tallies)
        except QauditError as error:
            late = "" if early else " (seen only once its weights are read)"
            return {"runs": "refused", "reason": line_of(error, folder) + late}
        except Exception as error:  # noqa: BLE001 - nor does a crash end the others
            return {"runs": "wrong", "reason": line_of(error, folder)}
        if early:
            return {"runs": "wrong", "reason": f"runs, although the plan refuses it: {early}"}
        return result


def _must_open(folder):
    """Return why the plan would refuse a model from its headers, or nothing."""
    header_sizes(folder)
    weights = WeightFolder(folder)
    try:
        must_open(folder, {name: weights.shape(name) for name in weights.names()})
    except QauditError as error:
        return line_of(error, folder)
    return ""


def _audit(folder, scratch):
    feed = Feed(make_batches(_CALIBRATION, _LONGEST), make_batches(_WINDOWS, _LONGEST, 160))
    return tallies_of(folder, scratch, feed, parse_schemes(_SCHEMES))


def tallies_of(folder, scratch, feed, schemes=()):
    """Measure as an audit does, by the route that it takes."""
    route = Route(folder, WeightFolder(folder), Machine(_CPU, torch.float32, 0))
    with HiddenStates(scratch, 10**9, _CPU) as states:
        return route.follow(feed, schemes, states, lambda *_: None)


def _compared(plain, documents, wanted, tallies):
    spec, gptq = (scheme.spec for scheme in parse_schemes(_SCHEMES))
    linears = tallies[spec].linears
    result = {"runs": "in blocks"}
    result["fp"] = _difference(tallies[FULL_PRECISION], wanted)
    left = reference.left(plain, linears)
    result["left"] = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in left})
    result["quantized"], unknown = reference.round_in_place(plain, linears)
    # KL divergences to full precision, summed over tokens; padding is in both.
    apart, most = (float(sum(kl.double().sum() for kl in tallies[s].kl)) for s in (gptq, spec))
    result["gptq"] = float(f"{apart / most:.2f}")
    result["rtn"] = _difference(tallies[spec], reference.losses(plain, documents))
    if unknown:
        result |= {"runs": "wrong", "reason": f"no linear layer `{min(unknown)}` in transformers"}
    elif not (result["fp"] <= TOLERANCE and result["rtn"] <= TOLERANCE):  # nor where one is NaN
        result |= {"runs": "wrong", "reason": "losses differ"}
    return result


def _difference(tally, wanted):
    """Return the largest relative difference of a document's loss."""
    batches = make_batches(_WINDOWS, _LONGEST, 160)
    losses = document_sums(batches, tally.nll, _WINDOWS, len(_WINDOWS))[0]
    return float(f"{np.max(np.abs(losses - wanted) / np.abs(wanted)):.1e}")


def line_of(error, folder):
    """Return an error in a line, without the folder that the model was in."""
    text = error.message if isinstance(error, QauditError) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(text.replace(str(folder), "MODEL"), 160, placeholder=" ...")


@contextmanager
def _within(seconds):
    def stop(*_):
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
