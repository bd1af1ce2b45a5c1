"""Which linears share an input, which scales fold, and that a false fold is never believed."""

import pytest
import torch
from torch import nn

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.linears import Quantized
from qaudit.errors import ModelError
from qaudit.model.blocks import BlockModel
from qaudit.model.structure import (
    Fold,
    Heads,
    candidates,
    find_structure,
    leaves_unchanged,
    must_be_linear,
    true_folds,
)
from tests.support import tiny
from tests.support.filled import filled

QKV, OUT = "self_attn.q_proj+self_attn.k_proj+self_attn.v_proj", "self_attn.o_proj"
GATE_UP, DOWN = "mlp.gate_proj+mlp.up_proj", "mlp.down_proj"
GATED = dict.fromkeys((QKV, OUT, GATE_UP, DOWN), True)
INNER = GATED | {QKV: False, GATE_UP: False}

# family -> groups in order of execution, True where a scale folds
FOUND = {
    # qwen2: with biases on q, k and v; qwen3: norms on q and k; gemma: norms multiply by
    # (1 + weight); gemma2: norms before and after
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma", "gemma2"), GATED),
    # olmo: norms without weights; the others: norms after
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "exaone4"), INNER),
    "apertus": {QKV: True, OUT: True, "mlp.up_proj": True, DOWN: False},  # xIELU
    "nemotron": {QKV: True, OUT: True, "mlp.up_proj": True, DOWN: False},  # squared ReLU
    "cohere": {f"{QKV}+{GATE_UP}": True, OUT: True, DOWN: True},  # attention beside the MLP
    "phi3": {"self_attn.qkv_proj": True, OUT: True, "mlp.gate_up_proj": True, DOWN: True},
    "gpt2": {"attn.c_attn": True, "attn.c_proj": True, "mlp.c_fc": True, "mlp.c_proj": False},
    "gpt_neox": {
        "attention.query_key_value": True,
        "attention.dense": False,  # q, k and v of a head lie together
        "mlp.dense_h_to_4h": True,
        "mlp.dense_4h_to_h": False,
    },
    # A ReLU lets a positive scale through.
    "opt": {QKV: True, "self_attn.out_proj": True, "fc1": True, "fc2": True},
}


def blocks_of(folder, dtype=torch.float32):
    model = BlockModel(folder, WeightFolder(folder), dtype=dtype, device=torch.device("cpu"))
    model.embed(tiny.tokens(1, 24))
    return model.blocks()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((n, torch.float32) for n in FOUND), ("llama", torch.bfloat16), ("olmo2", torch.bfloat16)],
)
def test_groups_and_folds_of_a_family(family, dtype, once):
    for block in filled(blocks_of(once(tiny.make, family), dtype)):
        found = {group.name: group.fold_C is not None for group in block.groups}
        assert list(found.items()) == list(FOUND[family].items())  # in order of execution
        assert block.notes == ()
        if family == "llama":  # attention and the MLP read norms
            assert [group.fold_is_norm for group in block.groups] == [True, False, True, False]


@pytest.mark.parametrize(
    ("query", "key_value", "width"), [(4, 2, 16), (40, 8, 4), (6, 1, 8), (4, 4, 16)]
)
@torch.no_grad()
def test_one_scale_is_shared_by_the_query_heads_of_a_kv_channel(query, key_value, width, tmp_path):
    shape = {"head_dim": width, "hidden_size": query * width, "num_attention_heads": query}
    blocks = blocks_of(tiny.make(tmp_path, "olmo2", **shape, num_key_value_heads=key_value))
    index_C = {group.name: group.fold_C for group in next(blocks).groups}[OUT]
    assert index_C is not None
    # Written out from the definition: head by head, channel by channel.
    shared = query // key_value
    expected = [(head // shared) * width + c for head in range(query) for c in range(width)]
    assert index_C.tolist() == expected


@torch.no_grad()
def test_a_found_fold_leaves_the_whole_block_unchanged(once):
    """A fold of OLMo 2, applied by hand, without any of the code that found it."""
    hidden_BTD, blocks = torch.randn(1, 24, 64), blocks_of(once(tiny.make, "olmo2"))
    block = next(blocks)
    before, scale, v = block.forward(hidden_BTD), torch.rand(32) + 0.5, "self_attn.v_proj"
    index_C = {group.name: group.fold_C for group in block.groups}[OUT]
    install = {v: block.weight(v) / scale[:, None], OUT: block.weight(OUT) * scale[index_C]}
    block.install(Quantized(install, bits=0))
    # fp32 rounding of sums of 64 terms of size one; the scales alone move the output by 0.1.
    assert torch.allclose(block.forward(hidden_BTD), before, rtol=0, atol=1e-5)
    block.restore()
    block.install(Quantized({OUT: install[OUT]}, bits=0))
    assert not torch.allclose(block.forward(hidden_BTD), before, rtol=0, atol=1e-2)


# ---------------------------------------------------------------------------- on plain blocks


def test_an_address_used_again_does_not_make_a_group():
    linears, x = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"}), torch.randn(2, 8)

    def run(block):  # the first linear's input is freed before the second's is made
        return block["c"](block["b"](block["a"](x * 1) * 2) * 3)

    assert find_structure(linears, run).readers == (("a",), ("b",), ("c",))


class Mlp(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        h = self.norm(x)
        gate, up = self.gate(h), self.up(h)
        mixed = {
            "gated": lambda: torch.sigmoid(gate) * up,
            "added": lambda: torch.sigmoid(gate) + up,  # nothing can be scaled here
            "shifted": lambda: torch.sigmoid(gate) * (up + 0.05),  # nearly right is wrong
            "clipped": lambda: torch.sigmoid(gate) * up.clamp(-0.5, 0.5),
            "leaking": lambda: torch.sigmoid(gate) * up,
        }[self.kind]()
        leak = 0.1 * h if self.kind == "leaking" else 0  # the norm is read by another
        return x + self.down(mixed) + leak


@pytest.mark.parametrize("kind", ["gated", "added", "shifted", "clipped", "leaking"])
@torch.no_grad()
def test_only_exact_folds_are_believed(kind):
    down, gate_up = kind in ("gated", "leaking"), kind != "leaking"
    block, x = Mlp(kind), torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(1))

    before = {name: p.clone() for name, p in block.named_parameters()}
    structure = find_structure(block, run := lambda module: module(x))
    guesses = list(candidates(block, structure, Heads(0, 0, 0)))
    found = {fold.linears: fold.source for fold in true_folds(block, run, guesses)}
    expected = ({("gate", "up"): "norm"} if gate_up else {}) | ({("down",): "up"} if down else {})
    assert found == expected
    assert all(torch.equal(p, before[name]) for name, p in filled(block.named_parameters()))


@torch.no_grad()
def test_a_fold_onto_the_wrong_channels_or_that_cannot_be_proved_is_not_believed():
    block, x = Mlp("gated"), torch.randn(1, 16, 8)

    def is_true(fold):
        return leaves_unchanged(block, lambda module: module(x), fold, block(x))

    right = Fold(("down",), "up", 0, torch.arange(12))
    assert is_true(right)
    assert not is_true(Fold(("down",), "up", 0, torch.arange(12).flip(0)))
    block.down.weight.zero_()  # no scale of its columns changes anything
    assert not is_true(right)


def test_a_fold_lost_in_a_later_block_is_dropped_there_and_noted(once):
    folder = once(tiny.make, "llama")
    weights = WeightFolder(folder)
    read = weights.read

    def with_a_dead_matrix(name):
        dead = name == "model.layers.1.mlp.down_proj.weight"
        return read(name) * 0 if dead else read(name)

    weights.read = with_a_dead_matrix
    model = BlockModel(folder, weights, dtype=torch.float32, device=torch.device("cpu"))
    notes, folds = {}, {}
    for block in model.blocks():
        notes[block.index] = block.notes
        folds[block.index] = [group.fold_C is not None for group in block.groups]
    # A dead `down_proj` hides what is done to its input, and to the input of what feeds it.
    assert folds == {0: [True] * 4, 1: [True, True, False, False], 2: [True] * 4}
    assert notes[0] == notes[2] == ()
    assert notes[1] == (
        "block 1: scale not folded, post_attention_layernorm -> mlp.gate_proj, mlp.up_proj",
        "block 1: scale not folded, mlp.up_proj -> mlp.down_proj",
    )


class Odd(nn.Module):
    """A linear that runs, one that does not, and weights in no linear."""

    def __init__(self, others, *, idle):
        super().__init__()
        self.used = nn.Linear(10, 10)
        if idle:
            self.idle = nn.Linear(10, 10)
        self.others = nn.Parameter(torch.zeros(others, 10, 10))

    def forward(self, x):
        return self.used(x)


def structure_of(block):
    return find_structure(block, lambda module: module(torch.ones(1, 10)))


def test_weights_no_scheme_would_see_are_refused():
    block = Odd(0, idle=False)
    must_be_linear(block, "block 0", structure_of(block))
    for others in (1, 4):
        block = Odd(others, idle=False)
        with pytest.raises(ModelError, match=r"% of block 0 would not be .* `others`: no linear"):
            must_be_linear(block, "block 0", structure_of(block))
    block = Odd(0, idle=True)  # a linear that does not run is left, and refused where it is large
    structure = structure_of(block)
    assert list(structure.left) == ["idle", "others"] and structure.readers == (("used",),)
    with pytest.raises(ModelError, match=r"`idle.weight`: it runs 0 times"):
        must_be_linear(block, "block 0", structure)
