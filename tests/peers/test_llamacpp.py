"""Blocks against ggml's own, and losses against the logits that llama.cpp decodes: `make peers`.

A checkpoint of the demo and what a scheme makes of it, both as float32 files that llama.cpp runs,
on text of the demo. Its logits are those of transformers but for the order of sums, 1e-5 of their
size; a divergence of 0.02 nats then agrees within a thousandth.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gguf import TYPES, GgufBlocks, pack
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.read_out import evidence_of
from qaudit.engine.tokens import Feed
from qaudit.errors import UsageError
from qaudit.formats.gguf import reading as gguf_base
from qaudit.formats.gguf.header import read_header
from qaudit.formats.gguf.reading import GgufFile
from qaudit.formats.weights import must_match
from qaudit.model.blocks import BlockModel
from qaudit.types import FULL_PRECISION, Corpus, EvaluationDocument, Protocol, Window
from tests.house.source import PACKAGE
from tests.support import released
from tests.support.converter import TOKENS, Converter
from tests.support.converter import TYPES as MODEL_TYPES
from tests.support.converter import make as make_converted
from tests.support.gguf import HASHES, importance, permuted, rewrite, weight, write_gguf
from tests.support.runtimes import REAL, place_with, snippet_of_export, verified
from tests.support.tiny import make

pytestmark = pytest.mark.peers

FOLDER = PACKAGE / "demo" / "stage1-step5000"
CPU, LENGTH, COUNT = torch.device("cpu"), 128, 12


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_bytes_and_weights_are_those_of_ggml(kind, weighted):
    from tests.support.llamacpp import dequantized, quantized

    normal = 0.02 * torch.randn(200, 1024, generator=torch.Generator().manual_seed(0))
    spread = torch.exp(3 * torch.randn(1024, generator=torch.Generator().manual_seed(1)))
    for values, means in ((weight(), importance()), (normal, spread)):
        ours = pack(kind, values, means if weighted else None)
        theirs = quantized(kind, values.numpy(), means.numpy() if weighted else None)
        assert (ours.numpy() == theirs).all()
        decoded = GgufBlocks(ours, kind).decode().numpy()
        assert np.array_equal(decoded, dequantized(kind, theirs, values.shape[1]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_hashes_of_the_other_tests_are_of_ggmls_bytes(kind, weighted):
    from tests.support.llamacpp import quantized

    theirs = quantized(kind, weight().numpy(), importance().numpy() if weighted else None)
    assert hashlib.sha256(theirs.tobytes()).hexdigest()[:16] == HASHES[kind, weighted]


def corpus():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode((PACKAGE / "demo" / "heldout.txt").read_text("utf-8")).ids
    parts = [ids[k * LENGTH : (k + 1) * LENGTH] for k in range(COUNT)]
    windows = tuple(Window(k, np.array(part, dtype=np.int32)) for k, part in enumerate(parts))
    documents = tuple(EvaluationDocument(f"d{k}", f"{k:064d}", 1) for k in range(COUNT))
    return Corpus(Protocol(LENGTH, LENGTH), (), windows, documents)


def log_softmax(z_NV):
    z_NV = z_NV - z_NV.max(1, keepdims=True)
    return z_NV - np.log(np.exp(z_NV).sum(1, keepdims=True))


@pytest.mark.parametrize("name", ["rtn-4bit", "rtn-8bit", "rtn-2bit"])
def test_evidence_is_that_of_llama_cpps_logits(name, tmp_path):
    from tests.support.llamacpp import logits_of

    text, scheme = corpus(), parse_scheme(f"{name}:group=128")
    feed = Feed((), make_batches(text.evaluation, LENGTH))
    model = BlockModel(FOLDER, WeightFolder(FOLDER), dtype=torch.float32, device=CPU)
    with HiddenStates(tmp_path, 10**9, CPU) as states:
        tallies = run_blocks(model, feed, [scheme], states)
    full, tally = tallies[FULL_PRECISION], tallies[scheme.spec]
    measured = evidence_of(text, feed, tally, full)
    assert measured.fidelity is not None

    folder = WeightFolder(FOLDER)
    tensors = {name: folder.read(name).float() for name in folder.names()}
    linears = {n: w for n, w in tensors.items() if n.endswith("_proj.weight")}
    quantized = {n: scheme.quantize(Linears({n: w}, None, None, 0)) for n, w in linears.items()}
    stored = tensors | {n: one.weights[n] for n, one in quantized.items()}
    windows = [window.tokens.tolist() for window in text.evaluation]
    for name, dense in (("p", tensors), ("q", stored)):
        write_gguf(FOLDER, tmp_path / f"{name}.gguf", dense=dense, words=False)
    p, q = (logits_of(tmp_path / f"{name}.gguf", windows) for name in "pq")
    for k, tokens in enumerate(windows):
        p_NV, q_NV = log_softmax(p[k][:-1]), log_softmax(q[k][:-1])
        kl_N = (np.exp(p_NV) * (p_NV - q_NV)).sum(1)
        rows = np.arange(len(kl_N))
        targets = np.array(tokens[1:])
        dp_N = np.exp(q_NV[rows, targets]) - np.exp(p_NV[rows, targets])
        assert measured.nll_sum[k] == pytest.approx(-q_NV[rows, targets].sum(), rel=1e-5)
        assert measured.fidelity.kl_sum[k] == pytest.approx(kl_N.sum(), rel=1e-3)
        assert measured.fidelity.kl_max[k] == pytest.approx(kl_N.max(), rel=1e-3)
        assert measured.fidelity.squared_dp_sum[k] == pytest.approx((dp_N**2).sum(), rel=1e-3)
        same = int((p_NV.argmax(1) == q_NV.argmax(1)).sum())
        assert abs(int(measured.fidelity.same_top[k]) - same) <= 1


# ------------------------------------------------------------------- files that llama.cpp runs

WINDOWS = [[(7 * k + 3 * j) % 250 + 3 for j in range(48)] for k in range(4)]


@torch.no_grad()
def mean_loss(logits):
    losses = [
        -log_softmax(z[:-1])[np.arange(len(tokens) - 1), tokens[1:]].mean()
        for z, tokens in zip(logits, WINDOWS, strict=True)
    ]
    return float(np.mean(losses))


@torch.no_grad()
def transformers_loss(folder, dense):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, tensor in dense.items():
        model.get_parameter(name).data = tensor
    return mean_loss([model(torch.tensor([one])).logits[0].double().numpy() for one in WINDOWS])


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    # Weights in float32 leave the order of sums. Otherwise llama.cpp rounds activations to 8 bits,
    # which changes the mean of these 188 losses by up to 0.0025.
    [("F32", 1e-5), ("Q8_0", 5e-3), ("Q4_0", 5e-3), ("Q3_K", 5e-3), ("Q4_K", 5e-3), ("Q6_K", 5e-3)],
)
@pytest.mark.parametrize("family", ["llama", "olmo2", "qwen2"])
def test_llama_cpp_computes_the_loss_of_the_weights_that_are_read(
    kind, tolerance, family, tmp_path
):
    from tests.support.llamacpp import logits_of

    folder = make(tmp_path / "m", family, hidden_size=256, intermediate_size=256, head_dim=64)
    path, names = tmp_path / "m.gguf", WeightFolder(folder).names()
    write_gguf(folder, path, lambda n: kind if n.endswith("_proj.weight") else "F32", words=False)
    if kind == "F32":
        dense = {}
    else:
        weights = GgufFile(path, base=names)
        dense = {name: weights.read(name) for name in weights.names()}
    theirs = mean_loss(logits_of(path, WINDOWS))
    assert theirs == pytest.approx(transformers_loss(folder, dense), abs=tolerance)


# ------------------------------------------------------------------ files of `llama-quantize`


LLAMA = ("llama", {"intermediate_size": 512, "num_hidden_layers": 17})
OLMO = ("olmo2", {"intermediate_size": 96, "num_hidden_layers": 4})  # 256 does not divide 96


@pytest.mark.parametrize(
    ("family", "changes", "scheme", "file_type"),
    [
        (*LLAMA, "gguf-q4_k_m", 15),
        (*LLAMA, "gguf-q3_k_m", 12),
        (*OLMO, "gguf-q4_k_m", 15),
        (*OLMO, "gguf-q3_k_m", 12),
        (*LLAMA, "gguf-q4_k", 14),
    ],
)
def test_types_and_bytes_are_those_of_llama_quantize(family, changes, scheme, file_type, tmp_path):
    from tests.support.llamacpp import logits_of, quantize_file

    folder = make(tmp_path / "m", family, hidden_size=256, head_dim=64, **changes)
    plain, path = tmp_path / "plain.gguf", tmp_path / "quantized.gguf"
    write_gguf(folder, plain, words=False)
    # Q4_K alone is `--pure`: a Q4_K_S file has Q5_K for some values and down projections.
    quantize_file(plain, path, file_type, pure=not scheme.endswith("_m"))
    theirs = {one.name: one for one in gguf.GGUFReader(path).tensors}
    (number,) = (n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(number, changes["num_hidden_layers"])
    model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=CPU)
    dense = {}
    for k, block in enumerate(model.blocks()):
        for group in block.groups:
            quantized = parse_scheme(scheme).quantize(block.linears(group))
            for linear, stored in quantized.stored.items():
                name = f"model.layers.{k}.{linear}"
                one = theirs[f"{names.get_name(name)}.weight"]
                assert one.tensor_type.name == stored.kind, name
                heads = {"q_proj": 4, "k_proj": 2}.get(linear.rpartition(".")[2])
                packed = stored.packed_RB.numpy()
                if heads and family == "llama":
                    packed = permuted(packed, heads)
                assert np.array_equal(one.data, packed), name
                dense[f"{name}.weight"] = quantized.weights[linear]
    # As above: llama.cpp rounds activations to 8 bits.
    assert mean_loss(logits_of(path, WINDOWS)) == pytest.approx(
        transformers_loss(folder, dense), abs=5e-3
    )


_KEYS = {v for k in vars(gguf.Keys).values() for v in getattr(k, "__dict__", {}).values()}
KEYS = sorted(k[7:] for k in _KEYS if isinstance(k, str) and k.startswith("{arch}."))
OBEYED = [key for key in KEYS if re.match(r"attention\.|rope\.|(block|expert|feed)_", key)]


@dataclass(frozen=True)
class Converted:
    """A tiny model, the file that llama.cpp's converter makes of it, and what both compute."""

    folder: Path
    path: Path
    theirs: np.ndarray  # logits of llama.cpp
    plain: np.ndarray

    @property
    def apart(self):
        return float(np.abs(self.theirs - self.plain).max() / np.abs(self.plain).max())


@pytest.fixture(scope="session")
def convert():
    converter = Converter()
    yield converter
    converter.close()


@cache
def base_of(model_type, place, convert):
    from tests.support.llamacpp import logits_in_a_child

    folder, path = place / model_type, place / f"{model_type}.gguf"
    model = make_converted(folder, model_type)
    convert(folder, path)
    theirs = logits_in_a_child(path, TOKENS)
    assert theirs is not None
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return Converted(folder, path, theirs, plain)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_files_of_the_converter_are_read_as_llama_cpp_reads_them(model_type, folder, convert):
    """Two things hold: llama.cpp computes the logits, and the file means the model's tensors."""
    base = base_of(model_type, folder, convert)
    assert base.apart <= MODEL_TYPES[model_type].get("within", 1e-5)
    must_match("m", base.path, base.folder)
    stored = WeightFolder(base.folder)
    text = gguf_base.of_text([n for n in stored.names() if not n.startswith("visual.")])
    weights = GgufFile(base.path, base=text)
    assert set(text) - set(weights.names()) <= {"lm_head.weight"}
    for name in weights.names():
        dense = stored.read(name).float()
        assert weights.shape(name) == tuple(dense.shape), name
        # Logarithms of what a file stores are not the ones that were there, to the bit.
        assert torch.allclose(weights.read(name), dense, rtol=1e-5, atol=2e-6), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # which takes seconds where llama.cpp aborts
        patch.setenv("GGML_NO_BACKTRACE", "1")
        patch.setenv("OMP_THREAD_LIMIT", "1")  # of models that are too small for threads
        yield tmp_path_factory.mktemp("keys")


def _is_refused_or_the_same(base, metadata, folder):
    """Return whether llama.cpp obeys metadata; fail where it does, and they are accepted."""
    from tests.support.llamacpp import logits_in_a_child

    header = read_header(base.path)
    changed = {f"{header.architecture}.{key}": value for key, value in metadata.items()}
    try:
        as_described = replace(header, metadata={**header.metadata, **changed})
        gguf_base.must_match("m", as_described, base.folder)
    except UsageError:
        return True
    path = folder / "changed.gguf"
    rewrite(base.path, path, changed)
    other = logits_in_a_child(path, TOKENS)
    largest = np.abs(base.theirs).max()
    return other is None or bool(np.abs(other - base.theirs).max() <= 1e-6 * largest)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_metadata_that_changes_logits_is_refused(model_type, folder, convert):
    """Try every key of an architecture that the `gguf` package knows."""
    base = base_of(model_type, folder, convert)
    obeyed = [
        (key, value)
        for key in KEYS
        for value in (*(("yarn", "none") if key.endswith("type") else ()), 0, 2, 0.5, False)
        if not _is_refused_or_the_same(base, {key: value}, folder)
    ]
    assert not obeyed


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_metadata_are_refused_or_change_no_logits(data, folder, convert):
    model_type = data.draw(st.sampled_from(list(MODEL_TYPES)))
    numbers = st.integers(0, 64) | st.floats(0, 1e6, width=32) | st.booleans()
    layers = st.lists(st.integers(0, 4), min_size=3, max_size=4) | st.lists(
        st.booleans(), min_size=3
    )
    texts = st.sampled_from(["yarn", "linear", "none", "longrope"])
    keys = st.sampled_from(OBEYED) | st.sampled_from(KEYS)
    metadata = data.draw(st.dictionaries(keys, numbers | layers | texts, min_size=1, max_size=3))
    assert _is_refused_or_the_same(base_of(model_type, folder, convert), metadata, folder)


def test_the_text_of_a_wrapper_is_what_llama_cpp_computes(tmp_path):
    from tests.support.llamacpp import logits_in_a_child

    wrapper = released.save(tmp_path / "wrapper", "gemma3", **released.FOR_LLAMA_CPP)
    text, path = released.text_of_wrapper(wrapper, tmp_path / "text"), tmp_path / "text.gguf"
    write_gguf(text, path, words=False)
    must_match("m", path, wrapper)
    logits = logits_in_a_child(path, TOKENS)
    assert logits is not None
    with torch.no_grad():
        plain = released.plain(wrapper, "gemma3")(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(logits - plain).max() <= 1e-3 * np.abs(plain).max()


WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        pytest.param("gguf-q8_0", REAL, id="q8_0-135M"),
        pytest.param("gguf-q4_k", REAL, id="q4_k-135M"),
        pytest.param("gguf-mix:budget=5.5", WIDE, id="mix"),
    ],
)
@pytest.mark.usefixtures("without_pictures")
def test_verify_runs_an_exported_file(qaudit, tmp_path, monkeypatch, scheme, shape):
    """Rows of 576 columns do not divide by 256, so that `q4_k` falls back."""
    monkeypatch.chdir(place_with(tmp_path, **shape))
    run = verified(qaudit, "gguf", scheme)
    assert run["runtime"].startswith("xllamacpp")
    assert abs(run["difference"]) < 0.02  # it rounds activations to 8 bits


@pytest.mark.usefixtures("without_pictures")
def test_the_command_of_the_card_names_a_file_that_llama_cpp_reads(qaudit, tmp_path, monkeypatch):
    """`llama-completion` is in no wheel; compiled from llama.cpp's source, it ran this command."""
    monkeypatch.chdir(place_with(tmp_path))
    code = snippet_of_export(qaudit, "gguf", "rtn-4bit:group=32")
    prompt, command, _, file, *options = shlex.split(code)
    assert [prompt, command] == ["$", "llama-completion"]
    assert options == ["-p", "The quick brown fox", "-n", "64", "-no-cnv"]
    from tests.support.llamacpp import logits_in_a_child

    assert logits_in_a_child(Path(file), [1, 2, 3]) is not None
