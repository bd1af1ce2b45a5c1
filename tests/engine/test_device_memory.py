"""A pretended GPU that runs out of memory: nothing measured is lost, and the pass goes on."""

import subprocess
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig

from benchmarks.memory import audit, make_model, plain
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.measure import ON_HOST, attempts, measure
from qaudit.engine.tasks import Task
from qaudit.engine.tokens import Feed
from qaudit.errors import ModelError
from qaudit.planning.machine import Footprint
from qaudit.planning.sizes import Load, Sizes, TextSize, with_config
from qaudit.saved.results import ResultStore
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.types import Subject, Window
from tests.support.filled import filled
from tests.support.measured import MACHINE, corpus
from tests.support.models import save_model
from tests.support.passes import opened, tallies_of
from tests.support.pretended_device import pretended
from tests.support.series import find_checkpoints
from tests.support.tiny import header_sizes

SCHEMES = parse_schemes(["gptq-4bit"])
ON_GPU = replace(
    MACHINE,
    device=torch.device("cuda"),
    device_stream_limit_nbytes=10**9,
    keeps_weights=(SCHEMES[0].spec,),
)


@pytest.fixture
def checkpoint(once):
    (checkpoint,) = find_checkpoints(once(save_model, 0))
    return checkpoint


def on_gpu(checkpoint, folder, machine=ON_GPU):
    subject = Subject(checkpoint.label, ((checkpoint, 1.0),))
    task = Task.unplanned(subject, corpus(), SCHEMES)
    return [filed.measurement for filed in measure(task, machine, ResultStore(folder))]


def without_fault(folder, checkpoint):
    """Return measurements, what is reserved, and the first allocation of each line.

    Between them are the names of the files of weights that were kept.
    """
    first = {}
    with pretended() as device:
        device.allocates = lambda: first.setdefault(device.line(), device.tried)
        measurements = on_gpu(checkpoint, folder)
    return measurements, kept(folder), sorted(first.values()), device.reserved


@pytest.fixture
def whole(checkpoint, once):
    return once(without_fault, checkpoint)


def kept(folder):
    return [*filled(sorted(path.name for path in (folder / "kept").rglob("*.safetensors")))]


def held_and_planned(config, schemes, documents, folder):
    """Return what a pass holds on the device at its peak, and what the plan says of it."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    context, batches = config.max_position_embeddings, []
    for seed in (1, 2):
        draw = np.random.default_rng(seed)
        ids_DT = draw.integers(3, config.vocab_size, (documents, context))
        windows = [Window(k, ids_T.astype(np.int32)) for k, ids_T in enumerate(ids_DT)]
        batches.append(make_batches(windows, context))
    with pretended() as device:
        model = opened(folder, device="cuda")
        tallies_of(model, schemes, folder, Feed(*batches), 0)  # states are on the host
    load = Load.of(schemes, TextSize(documents * context, documents * context, context))
    sizes = with_config(header_sizes(folder), config.to_dict())
    return device.reserved, Footprint(sizes, load, 4, 0, "cuda").memory_nbytes


WIDTHS = ("hidden_size", "intermediate_size", "vocab_size", "num_key_value_heads")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "widths", "more", "schemes", "documents"),
    [
        (LlamaConfig, (512, 1376, 2048, 2), {"max_position_embeddings": 512}, DEFAULT_SCHEMES, 10),
        (LlamaConfig, (768, 2048, 1024, 2), {"max_position_embeddings": 512}, DEFAULT_SCHEMES, 4),
        (OlmoeConfig, (128, 512, 512, 4), {"max_position_embeddings": 256, "num_experts": 32,
         "num_experts_per_tok": 2}, ["gptq-4bit,awq-4bit"], 8),
    ],
)  # fmt: skip
def test_a_plan_names_what_a_device_holds(kind, widths, more, schemes, documents, tmp_path):
    shape = dict(zip(WIDTHS, widths, strict=True))
    config = kind(**shape, **more, num_attention_heads=4, num_hidden_layers=2)
    held, planned = held_and_planned(config, parse_schemes(schemes), documents, tmp_path)
    assert held / 1.5 < planned < 1.5 * held


def test_a_plan_counts_the_states_that_are_copied_beside_what_is_computed(tmp_path):
    cuda, hidden = torch.device("cuda"), 16
    with pretended() as device, HiddenStates(tmp_path, 10**9, cuda) as states:
        for k in range(12):
            states.put("first", k, torch.ones(8, 512, hidden, device=cuda))
        for k in range(12):
            states.put("second", k, states.get("first", k) + 1)
    held = device.reserved - 2 * 8 * 512 * hidden * 4  # a batch is read, another is made of it
    sizes = Sizes(0, 2, 0, 0, hidden, hidden, 100)
    load = Load.of(parse_schemes(["rtn-4bit"]), TextSize(4096, 12 * 4096, 512))
    planned = Footprint(sizes, load, 4, 0, "cuda")
    assert held / 1.5 < planned.copies_nbytes < 1.5 * held
    on_device = replace(planned, limit_nbytes=10**12)
    assert (on_device.copies_nbytes, replace(planned, device="cpu").copies_nbytes) == (0, 0)


def must_go_on(checkpoint, whole, files, folder, numbers):
    for number in numbers:
        with pretended() as device:
            device.fails_at = number
            measurements = on_gpu(checkpoint, folder / str(number))
        assert kept(folder / str(number)) == files
        for measurement, expected in zip(measurements, whole, strict=True):
            np.testing.assert_array_equal(measurement.evidence.nll_sum, expected.evidence.nll_sum)
            assert measurement.notes == (*expected.notes, ON_HOST), number


def test_a_pass_goes_on_with_its_states_on_the_host(checkpoint, whole, tmp_path):
    expected, files, first, _ = whole
    must_go_on(checkpoint, expected, files, tmp_path, [first[1], first[-1]])
    ways = attempts(ON_GPU, Feed((), ()))  # each but the first
    assert [machine.device_stream_limit_nbytes for machine, *_ in ways] == [10**9, 0]


@pytest.mark.slow
def test_a_pass_goes_on_after_a_fault_at_any_line(checkpoint, whole, tmp_path):
    expected, files, first, _ = whole
    must_go_on(checkpoint, expected, files, tmp_path, first)


def test_then_in_smaller_batches_with_a_note_and_then_the_subject_fails(
    checkpoint, whole, tmp_path
):
    *_, reserved = whole
    with pretended(capacity=int(0.9 * reserved)) as smaller:
        (_, measurement) = on_gpu(checkpoint, tmp_path / "smaller")
    assert smaller.reserved < reserved
    assert any("in batches of" in note for note in measurement.notes)
    name = f"out of memory while measuring `{checkpoint.label}`"
    with pretended(capacity=100_000), pytest.raises(ModelError, match=name) as refused:
        on_gpu(checkpoint, tmp_path / "none")
    assert "`--set context=N`" in refused.value.hint
    assert refused.value.code == 4


def test_a_host_without_memory_is_not_tried_again(checkpoint, tmp_path, monkeypatch):
    run_out = mock.Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    monkeypatch.setattr("qaudit.engine.block_pass.run_blocks", run_out)
    with pytest.raises(RuntimeError, match="can't allocate"):
        on_gpu(checkpoint, tmp_path, MACHINE)
    assert run_out.call_count == 1


# What the pass holds on the host, set against plain transformers: `benchmarks/memory.py`.


@pytest.mark.slow
def test_an_audit_needs_no_more_than_loading_the_model_and_does_not_grow_with_depth(tmp_path):
    make_model(tmp_path, layers=30)
    found = audit(tmp_path, tokens=4096)
    assert found["nbytes"] <= plain(tmp_path)
    assert found["nbytes"] <= found["estimate"] <= 3 * found["nbytes"]
    found = {}
    for layers in (12, 24):
        make_model(tmp_path / str(layers), layers)
        found[layers] = audit(tmp_path / str(layers), tokens=4096)["nbytes"]
    assert found[24] <= 1.1 * found[12]


_IN_A_LARGE_PROCESS = """
import subprocess, sys
large = b"1" * 15 * 10**8
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
_PEAK = """
import torch
from qaudit.engine.tasks import peak_nbytes
print(peak_nbytes(torch.device("cpu")))
"""


@pytest.mark.slow
def test_the_peak_of_a_process_is_not_that_of_its_parent():
    command = [sys.executable, "-c", _IN_A_LARGE_PROCESS, _PEAK]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 10**8 < int(done.stdout) < 10**9
