"""GGUF files become the weights that the `gguf` package reads in them, or an error by name."""

import json
import math
import shutil
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.errors import QauditError, SourceError, UsageError
from qaudit.formats.gguf import reading as gguf_base
from qaudit.formats.gguf.architectures import ARCHITECTURES, EVERYWHERE, made, place_of
from qaudit.formats.gguf.header import GgufHeader, bits_in, header_in, read_header
from qaudit.formats.gguf.metadata import differences, rope_factors
from qaudit.formats.gguf.reading import GgufFile
from qaudit.formats.weights import format_of, must_match, open_quantized
from tests.support import gguf_defaults
from tests.support.filled import filled
from tests.support.gguf import KINDS, write_gguf
from tests.support.tiny import FOR_LLAMA_CPP, make

FAMILIES = (
    "llama", "olmo", "olmo2", "olmo3", "qwen2", "qwen3", "smollm3", "mistral",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "granite", "phi3", "starcoder2", "nemotron", "stablelm", "cohere",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of each family, with a file of it beside its weights."""
    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        make(root / family, family, **FOR_LLAMA_CPP.get(family, {}))
        write_gguf(root / family, root / family / "m.gguf", matrices("Q4_0"))
    return {family: root / family for family in FAMILIES}


def names_of(folder):
    return list(WeightFolder(folder).names())


def matrices(kind):
    return lambda name: kind if name.endswith("_proj.weight") else "F32"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_read(family, folders, tmp_path):
    folder, path = folders[family], tmp_path / "m.gguf"
    meant = write_gguf(folder, path, matrices("Q8_0"))
    weights = GgufFile(path, base=names_of(folder))
    must_match("m", path, folder)
    names = set(names_of(folder))
    assert names >= set(weights.names()) >= names - {"lm_head.weight"}
    for name in weights.names():
        assert torch.equal(weights.read(name), meant[name]), name
        assert weights.shape(name) == tuple(meant[name].shape)
    assert weights.bits == 8
    assert all(name.endswith("_proj.weight") for name in filled(weights.linears))


READ = (*KINDS, "Q4_1", "MXFP4", "TQ1_0", "TQ2_0", "BF16", "F16")
TYPES = [kind.name for kind in gguf.GGMLQuantizationType if kind.name in READ]


@pytest.mark.parametrize("kind", TYPES)
def test_types_are_decoded_as_the_package_decodes_them(kind, tmp_path):
    folder = tmp_path / "wide"
    make(folder, "llama", hidden_size=256, intermediate_size=256, head_dim=64)
    meant = write_gguf(
        folder, tmp_path / "m.gguf",
        lambda name: {"down_proj": "Q8_0", "up_proj": kind}.get(name.split(".")[-2], "F32"),
    )  # fmt: skip
    weights = open_quantized(tmp_path / "m.gguf", base=names_of(folder))
    for name in filled(weights.names()):
        assert torch.equal(weights.read(name), meant[name])


def test_bits_are_those_of_most_codes_or_of_the_name_and_bytes_those_of_blocks(folders, tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(folders["llama"], path, lambda n: "Q5_0" if "down" in n else "Q4_0")
    weights = GgufFile(path, base=names_of(folders["llama"]))
    assert (weights.bits, bits_in(read_header(path), path)) == (4, 4)
    assert format_of(path) == ("gguf", 4, 16)
    assert weights.nbytes_of("model.layers.0.mlp.down_proj.weight") == 64 * 128 // 32 * 22
    tensors = gguf.GGUFReader(path).tensors
    assert weights.nbytes == sum(one.n_bytes for one in tensors)
    for name, file_type, bits in (
        ("m", 15, 4),  # Q4_K_M
        ("m.Q6_K", 1024 + 12, 3),  # Q3_K_M, guessed
        ("m-Q4_K_M", None, 4),
        ("m-UD-IQ3_XXS", 1, 3),  # mostly F16 says nothing
        ("m-mxfp4", 1000, 4),
        ("Q4m", None, 5),
    ):
        metadata = {} if file_type is None else {"general.file_type": file_type}
        path = tmp_path / f"{name}.gguf"
        write_gguf(folders["llama"], path, matrices("Q5_0"), metadata=metadata)
        weights = GgufFile(path, base=names_of(folders["llama"]))
        assert (weights.bits, format_of(path)) == (bits, ("gguf", bits, 16)), name
        said = f"judged in the class of its name, {bits} bits: most of its codes have 5"
        assert weights.notes == ((said,) if bits != 5 else ())


# ------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def file(folders):
    return (folders["llama"] / "m.gguf").read_bytes()


def reason(path, base=None):
    with pytest.raises(QauditError) as caught:
        weights = open_quantized(path, base=names_of(base) if base else ())
        for name in weights.names():
            weights.read(name)
    assert caught.value.hint
    return caught.value.message


def test_other_files_and_numbers_that_are_not_finite_are_refused_by_name(folders, file, tmp_path):
    path, shares = tmp_path / "m.gguf", (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999)
    for data, words in (
        (file.replace(b"llama", b"rwkv6", 1), "architecture `rwkv6`"),
        (b"GGML" + bytes(64), "is not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds no tensors"),
        *((file[: int(share * len(file))], "cut short") for share in shares),
    ):
        path.write_bytes(data)
        assert words in reason(path)
    write_gguf(folders["llama"], path, matrices("Q4_0"), metadata={"split.count": 3})
    assert "one of 3 parts" in reason(path)
    write_gguf(folders["llama"], path)
    with pytest.raises(SourceError, match="no linear of the GGUF file is quantized"):
        format_of(path)
    (one,) = (t for t in read_header_of(file).values() if t.name == "blk.1.ffn_down.weight")
    damaged = bytearray(file)
    damaged[one.start : one.start + 2] = b"\xff\xff"  # a scale that is no number
    path.write_bytes(damaged)
    assert reason(path, folders["llama"]).endswith("holds NaN or infinity")


def read_header_of(data):
    return header_in(Path("m.gguf"), data, len(data)).tensors


def test_tensors_without_a_place_are_refused_but_for_blocks_that_look_ahead(folders, tmp_path):
    base = folders["llama"]
    path, names = base / "m.gguf", names_of(base)
    with pytest.raises(SourceError, match="for which its base has no place"):
        GgufFile(path, base=[name for name in names if "layers.2.mlp.up" not in name])
    with pytest.raises(SourceError, match=r"has nothing for `model\.other\.weight`"):
        GgufFile(path, base=[*names, "model.other.weight"])
    path = tmp_path / "m.gguf"
    ahead = {"llama.block_count": 4, "llama.nextn_predict_layers": 1}
    more = {"blk.3.attn_norm": torch.ones(64), "blk.3.nextn.eh_proj": torch.ones(64, 128)}
    write_gguf(base, path, matrices("Q4_0"), metadata=ahead, more=more)
    must_match("m", path, base)
    for more_names in ((), ("mtp.fc.weight", "model.layers.3.eh_proj.weight")):
        assert set(GgufFile(path, base=[*names, *more_names]).names()) == set(names)
    write_gguf(base, path, matrices("Q4_0"), metadata={}, more=more)
    with pytest.raises(SourceError, match="for which its base has no place"):
        GgufFile(path, base=names)


def test_another_model_is_refused_by_its_key(folders, tmp_path):
    config = json.loads((folders["llama"] / "config.json").read_text())
    for key, value, sentence in (
        ("model_type", "qwen2", "its `architecture` is llama"),
        ("num_hidden_layers", 99, "`llama.block_count` is 3 where the base needs 99"),
        ("hidden_size", 128, "`llama.embedding_length` is 64"),
        ("num_key_value_heads", 4, "`llama.attention.head_count_kv` is 2"),
        ("rms_norm_eps", 0.5, "`llama.attention.layer_norm_rms_epsilon` is"),
        ("hidden_act", "gelu", "`llama.hidden_act` is silu where the base needs gelu"),
        ("rope_theta", 5e5, "`llama.rope.freq_base` is 10000"),
    ):
        own = {k: v for k, v in config.items() if k != "rope_parameters" or key != "rope_theta"}
        (tmp_path / "config.json").write_text(json.dumps({**own, key: value}))
        with pytest.raises(UsageError, match=sentence):
            must_match("m", folders["llama"] / "m.gguf", tmp_path)


NUMBERS = (
    ("attention.layer_norm_rms_epsilon", 0.5), ("attention.sliding_window", 2),
    ("rope.dimension_count", 2), ("rope.freq_base", 500.0), ("rope.scaling.factor", 4.0),
    ("rope.scale_linear", 4.0), ("rope.scaling.attn_factor", 2.0), ("expert_count", 8),
    ("expert_used_count", 2), ("attention.key_length", 8), ("attention.clamp_kqv", 0.1),
    ("attention.scale", 1.0), ("attention.causal", False), ("rope.scaling.yarn_ext_factor", 1.0),
    ("feed_forward_length", [128, 128, 64]), ("block_count", float("nan")),
    ("rope.freq_base", 1e300), ("final_logit_softcapping", 30.0), ("rope.scaling.type", "yarn"),
    ("attention.head_count", True), ("rope.dimension_count", []), ("block_count", None),
    ("attention.layer_norm_rms_epsilon", None),
)  # fmt: skip


def check(folder, changes):
    """Hold a folder's file to its model when metadata is changed; None removes a key."""
    header = read_header(folder / "m.gguf")
    metadata = {k: v for k, v in {**header.metadata, **changes}.items() if v is not None}
    gguf_base.must_match("m", replace(header, metadata=metadata), folder)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_metadata_by_which_llama_cpp_computes_otherwise_is_refused(family, folders):
    for key, value in NUMBERS:
        with pytest.raises(UsageError, match=f"`{family}.{key}`|scaling.factor` is 4.0"):
            check(folders[family], {f"{family}.{key}": value})


def test_neutral_metadata_is_accepted_and_a_window_is_the_base_s(folders):
    neutral = {
        "context_length": 7, "vocab_size": 1, "expert_count": 0, "rope.scaling.factor": 1.0,
        "nextn_predict_layers": "yarn",
        "rope.scaling.type": "none", "attention.causal": True, "attention.key_length": 16,
        "rope.scaling.finetuned": True, "feed_forward_length": [128] * 3,
    }  # fmt: skip
    changes = {f"llama.{key}": value for key, value in neutral.items()}
    check(folders["llama"], {**changes, "general.name": "x"})
    key = "olmo2.attention.sliding_window"
    for changes in ({key: None}, {key: 2}, {f"{key}_pattern": [True] * 4}, {f"{key}_pattern": 2}):
        with pytest.raises(UsageError, match=key):
            check(folders["olmo3"], changes)
    check(folders["olmo3"], {f"{key}_pattern": None})


@pytest.fixture
def scaled(folders, tmp_path):
    """Return a function that copies a base whose rotations are scaled."""

    def scale(kind):
        own = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
        if kind == "llama3":
            own |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if kind != "linear":
            own["original_max_position_embeddings"] = 32
        base = shutil.copytree(folders["llama"], tmp_path / kind)
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "rope_parameters": own}))
        return base

    return scale


def test_rotations_are_those_of_the_base(scaled, tmp_path):
    for kind in ("linear", "yarn"):
        changes = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
        if kind == "yarn":
            changes["llama.rope.scaling.original_context_length"] = 32
        base = scaled(kind)
        check(base, changes)
        for key in changes:
            if (kind, key) != ("linear", "llama.rope.scaling.type"):  # llama.cpp's default
                with pytest.raises(UsageError, match=key):
                    check(base, {**changes, key: None})
    base, path = scaled("llama3"), tmp_path / "m.gguf"
    plain = {name: WeightFolder(base).read(name).float() for name in names_of(base)}
    write_gguf(base, path, dense=plain)
    with pytest.raises(UsageError, match="`rope_freqs"):
        must_match("m", path, base)
    config = AutoConfig.from_pretrained(base)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    usual = 10000.0 ** (-torch.arange(len(scaled)) / len(scaled))
    ours = rope_factors(json.loads((base / "config.json").read_text()), len(scaled))
    assert torch.allclose(torch.tensor(ours), usual / scaled, rtol=1e-5)
    write_gguf(base, path, dense=plain, more={"rope_freqs": usual / scaled})
    must_match("m", path, base)
    write_gguf(base, path, dense=plain, more={"rope_freqs": 2 * usual / scaled})
    with pytest.raises(UsageError, match="`rope_freqs"):
        must_match("m", path, base)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family, folders):
    header = read_header(folders[family] / "m.gguf")
    short = {"model_type": family, "num_hidden_layers": 4}
    usual = {**CONFIG_MAPPING[family]().to_dict(), "num_hidden_layers": 4, "layer_types": None}
    usual["no_rope_layers"] = None
    sizes = {key: usual[key] for key in (
        "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings",
    )}  # fmt: skip
    wanted = {key: one for key, _, one in differences(header, usual)}
    assert wanted == {key: one for key, _, one in differences(header, short | sizes)}


def test_what_single_architectures_read_is_of_the_base_and_defaults_are_written():
    for config, key, value, differs in (
        *(({"model_type": "nemotron_h", "layer_norm_epsilon": 1e-5},
           "attention.layer_norm_rms_epsilon", value, value != 1e-5) for value in (1e-5, 0.5)),
        # llama.cpp loads a file with another step, and computes other blocks without experts.
        *(({"model_type": "ernie4_5_moe", **written}, "interleave_moe_layer_step", step, differs)
          for written, step, differs in (
              ({}, 1, False), ({}, 2, True), ({"moe_layer_interval": 2}, 2, False),
              ({"moe_layer_interval": 2}, 3, True))),
        *(({"model_type": family}, "rope.scaling.finetuned", switch, differs)
          for family, switch, differs in (
              ("granite", True, False), ("granite", False, True), ("granitemoe", False, False))),
    ):  # fmt: skip
        name = {"ernie4_5_moe": "ernie4_5-moe"}.get(str(config["model_type"]), config["model_type"])
        header = GgufHeader({"general.architecture": name, f"{name}.{key}": value}, {})
        assert (key in {k for k, _, _ in differences(header, config)}) is differs
    written = (gguf_defaults.FOLDER / "defaults.json").read_text("utf-8")
    assert written == gguf_defaults.text(), "python -m tests.support.gguf_defaults"


PLAIN = {f"t{k}": k for k in range(256)}
SPACED = {"vocab": {"a": 0, "▁▁": 1}, "merges": [], "type": "BPE"}
MERGED = {"vocab": PLAIN, "merges": [["t", "1"], ["a b", "c"]]}


def test_words_are_those_of_the_base(folders, tmp_path):
    base = shutil.copytree(folders["llama"], tmp_path / "base")
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": PLAIN}}))
    write_gguf(base, base / "m.gguf", matrices("Q4_0"))
    for model, metadata, match in (
        ({"vocab": PLAIN}, {}, None),
        ({"vocab": {**PLAIN, "t7": 8, "t8": 7}}, {}, "another vocabulary"),
        (MERGED, {"merges": ["t 1", "a\u0120b c"]}, None),
        (MERGED, {"merges": ["a\u0120b c", "t 1"]}, "has other merges than"),
        (SPACED, {"tokens": ["a", "  "], "token_type": [1, 4]}, None),  # found before words are
        (SPACED, {"tokens": ["a", "  "], "token_type": [1, 1]}, "another vocabulary"),
    ):
        (base / "tokenizer.json").write_text(json.dumps({"model": model}))
        with pytest.raises(UsageError, match=match) if match else nullcontext():
            check(base, {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(data, folders, file, tmp_path):
    """Change a few bytes of the header, where every length and count is."""
    damaged = bytearray(file)
    first = min(one.start for one in read_header_of(file).values())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, first - 1))
        span = data.draw(st.sampled_from([1, 4, 8]))
        damaged[at : at + span] = data.draw(st.binary(min_size=span, max_size=span))
    cut = data.draw(st.sampled_from([len(damaged), first, first // 2]))
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged[:cut])
    try:
        must_match("m", path, folders["llama"])
        weights = open_quantized(path, base=names_of(folders["llama"]))
        for name in weights.names()[:6]:
            weights.read(name)
    except QauditError as error:
        assert error.hint


# ------------------------------------------------------- tensors that are joined, split or turned
# Each test writes what the converter's class says of one tensor; `make peers` runs the converter.


HEADS, SHARED, PER_HEAD, WIDTH, EXPERTS = 4, 2, 8, 16, 3
SIZES = {"attention.head_count": HEADS, "attention.head_count_kv": SHARED,
         "ssm.group_count": SHARED, "ssm.time_step_rank": HEADS,
         "ssm.inner_size": HEADS * PER_HEAD}  # fmt: skip


def header(architecture):
    metadata = {f"{architecture}.{key}": value for key, value in SIZES.items()}
    return GgufHeader({"general.architecture": architecture, **metadata}, {})


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5


def fused_attention(qkv):
    groups = qkv.reshape(SHARED, HEADS // SHARED + 2, PER_HEAD, *qkv.shape[1:])
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return [torch.cat([part.reshape(-1, *qkv.shape[1:]) for part in parts])]


def of_latents(kv):
    keys, values = kv.reshape(HEADS, -1, WIDTH).split([5, 7], 1)
    return [keys.transpose(1, 2), values]


def linear_attention(fused):
    """Let the heads of values of a key be apart, as `_reorder_v_heads` does."""
    others, values = fused[: -HEADS * PER_HEAD], fused[-HEADS * PER_HEAD :]
    return [torch.cat([others, apart(values)])]


def apart(values):
    split = values.reshape(SHARED, HEADS // SHARED, -1, *values.shape[1:])
    return split.transpose(0, 1).reshape(values.shape)


def keys_values_gates(fused):
    each = HEADS // SHARED * PER_HEAD
    groups = fused.reshape(SHARED, -1, WIDTH).split([5, 5, each, each], 1)
    query, key, values, gates = (part.reshape(-1, WIDTH) for part in groups)
    return [torch.cat([query, key, values]), gates]


def halves(fused):
    return list(fused.chunk(2, -2))


CASES = [
    ("falcon", "self_attention.query_key_value.weight",
     random((HEADS + 2 * SHARED) * PER_HEAD, WIDTH), fused_attention),
    ("bloom", "self_attention.query_key_value.bias",
     random((HEADS + 2 * SHARED) * PER_HEAD), fused_attention),
    ("deepseek2", "self_attn.kv_b_proj.weight", random(HEADS * 12, WIDTH), of_latents),
    ("gpt-oss", "mlp.experts.gate_up_proj", random(EXPERTS, WIDTH, 10),
     lambda t: [t.transpose(1, 2)[:, ::2], t.transpose(1, 2)[:, 1::2]]),
    ("gpt-oss", "mlp.experts.gate_up_proj_bias", random(EXPERTS, 10),
     lambda t: [t[:, ::2], t[:, 1::2]]),
    ("gpt-oss", "mlp.experts.down_proj", random(EXPERTS, 10, WIDTH),
     lambda t: [t.transpose(1, 2)]),
    ("granitemoe", "block_sparse_moe.input_linear.weight", random(EXPERTS, 10, WIDTH), halves),
    ("granitemoe", "shared_mlp.input_linear.weight", random(10, WIDTH), halves),
    ("dbrx", "ffn.experts.mlp.w1", random(EXPERTS * 10, WIDTH),
     lambda t: [t.reshape(EXPERTS, 10, WIDTH)]),
    ("dbrx", "ffn.experts.mlp.w2", random(EXPERTS * 10, WIDTH),
     lambda t: [t.reshape(EXPERTS, 10, WIDTH).transpose(1, 2)]),
    ("gpt2", "attn.c_attn.weight", random(10, WIDTH), lambda t: [t.T]),
    ("qwen35", "linear_attn.in_proj_qkv.weight", random(20 + HEADS * PER_HEAD, WIDTH),
     linear_attention),
    ("qwen35", "linear_attn.in_proj_z.weight", random(HEADS * PER_HEAD, WIDTH),
     lambda t: [apart(t)]),
    ("qwen35", "linear_attn.out_proj.weight", random(WIDTH, HEADS * PER_HEAD),
     lambda t: [apart(t.T).T]),
    ("qwen35", "linear_attn.dt_bias", random(HEADS), lambda t: [apart(t)]),
    ("qwen35moe", "mlp.experts.gate_up_proj", random(EXPERTS, 10, WIDTH), halves),
    ("qwen3next", "linear_attn.in_proj_qkvz.weight",
     random(SHARED * 10 + 2 * HEADS * PER_HEAD, WIDTH), keys_values_gates),
    ("gptneox", "attention.query_key_value.weight", random(3 * HEADS * PER_HEAD, WIDTH),
     lambda t: [t.reshape(HEADS, 3, PER_HEAD, WIDTH).transpose(0, 1).reshape(-1, WIDTH)]),
    ("lfm2", "conv.conv.weight", random(WIDTH, 1, 3), lambda t: [t[:, 0]]),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "name", "dense", "stored_of"), CASES)
def test_a_moved_tensor_is_made_again(architecture, name, dense, stored_of):
    moves = (*ARCHITECTURES[architecture].moves, *EVERYWHERE)
    place = place_of(moves, f"model.layers.7.{name}")
    assert place is not None
    tensors, made = place
    stored = stored_of(dense)
    assert len(tensors) == len(stored) and all(one.startswith("blk.7.") for one in tensors)
    assert made is not None
    assert torch.equal(made(stored, header(architecture)), dense)
    empty = [part.to("meta") for part in stored]
    assert made(empty, header(architecture)).shape == dense.shape


def test_a_renamed_tensor_is_read_as_it_is():
    for name, own in (
        ("model.layers.3.mlp.gate.e_score_correction_bias", "blk.3.exp_probs_b.bias"),
        ("model.layers.3.self_attn.sinks", "blk.3.attn_sinks.weight"),
        ("model.norm.weight", None),
        ("model.layers.3.mlp.up_proj.weight", None),
    ):
        assert place_of(EVERYWHERE, name) == (((own,), None) if own else None)


@pytest.mark.parametrize("number", [-2, 0, 3, 2**40, math.nan, "many", [1, "many"]])
def test_numbers_of_a_header_that_do_not_fit_are_refused(number):
    """They divide sizes; whatever they are, a tensor is made or refused by name."""
    for architecture, name, dense, stored_of in CASES:
        _, make = place_of((*ARCHITECTURES[architecture].moves, *EVERYWHERE), f"blocks.7.{name}")
        parts = [part.to("meta") for part in stored_of(dense)]
        for key in SIZES:
            hostile = header(architecture)
            hostile.metadata[f"{architecture}.{key}"] = number
            try:
                assert made(name, make, parts, hostile).numel() == dense.numel()
            except SourceError as refusal:
                assert name in str(refusal)
