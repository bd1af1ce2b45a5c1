"""What is planned beside a recipe: bit classes that shapes decide, candidates."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cut import checkpoint
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gguf import TYPES
from qaudit.core.registry import parse_scheme, parse_schemes, scheme_sets
from qaudit.core.schemes import gguf
from qaudit.errors import UsageError
from qaudit.model.blocks import BlockModel
from qaudit.planning.price import (
    candidates_of,
    class_notes,
    planned_bits,
    planned_class,
    refuse_classes,
)
from qaudit.planning.sizes import Sizes
from qaudit.types import GREEDY, Pass, Price, Recipe, Subject
from tests.support.tiny import header_sizes, make


def zeros(kind, weight_RC, _):
    rows, columns = weight_RC.shape
    nbytes = columns // TYPES[kind].columns * TYPES[kind].nbytes
    return torch.zeros(rows, nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_planned_bits_are_stored_ones(family, tmp_path, monkeypatch):
    changes = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 17,
               "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    changes = changes if family == "llama" else {}
    monkeypatch.setattr(gguf, "pack", zeros)  # searching the scales takes 20 times longer
    folder = make(tmp_path, family, **changes)
    sizes = header_sizes(folder)
    model = BlockModel(
        folder, WeightFolder(folder), dtype=torch.float32, device=torch.device("cpu")
    )
    blocks = [[block.linears(group) for group in block.groups] for block in model.blocks()]
    for scheme in map(parse_scheme, scheme_sets()["gguf"]):
        quantized = [scheme.quantize(linears) for groups in blocks for linears in groups]
        weights = sum(w.numel() for one in quantized for w in one.weights.values())
        assert planned_bits(scheme, sizes) == sum(one.bits for one in quantized) / weights


def sizes_of(columns):
    return Sizes.of(
        {
            f"model.layers.{block}.{name}.weight": (columns, columns)
            for block in range(4)
            for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        },
        "m",
    )


def test_types_that_do_not_fit_are_planned_in_the_class_of_what_replaces_them_or_refused():
    schemes = parse_schemes(["gguf-q4_k,gguf-q5_k,gguf-q6_k,gguf-q8_0,rtn-4bit"])
    assert [planned_class(s, sizes_of(512)) for s in schemes] == ["4", "5", "6", "8", "4"]
    assert [planned_class(s, sizes_of(384)) for s in schemes] == ["5", "5", "8", "8", "4"]
    for matrices in ({}, {(0, "attn.c_attn"): (96, 288)}):  # unknown: the class of the name
        assert planned_class(schemes[0], replace(sizes_of(384), matrices=matrices)) == "4"
    assert not list(class_notes(schemes, sizes_of(512)))
    assert list(class_notes(schemes, sizes_of(384))) == [
        "`gguf-q4_k` stores 5.50 bits per weight of this model, and competes in class 5",
        "`gguf-q6_k` stores 8.50 bits per weight of this model, and competes in class 8",
    ]
    recipe = Recipe(targets=("m",), bits=("4",))
    schemes = parse_schemes(["gguf-q4_k"])
    refuse_classes(recipe, schemes, None)
    refuse_classes(recipe, schemes, sizes_of(512))
    with pytest.raises(UsageError, match="asks for 4 bits") as refused:
        refuse_classes(recipe, schemes, sizes_of(384))
    assert "stores 5.50 bits per weight" in str(refused.value.hint)
    with pytest.raises(UsageError):
        refuse_classes(recipe, parse_schemes(["rtn-3bit"]), None)


SPECS = tuple(parse_scheme(f"rtn-{bits}bit:group=16").spec for bits in (3, 4))
SERIES = [checkpoint(n, 100 + n) for n in range(4)]


def alone(one):
    return Subject(one.label, ((one, 1.0),))


def search(label, *members, scheme=SPECS[1]):
    shares = tuple((one, 1 / len(members)) for one in members)
    price = Price(flops=60.0, nbytes_read=1, streams=6)
    return Pass(Subject(label, shares, f"{GREEDY}:scheme={scheme}"), SPECS, price=price)


def test_only_what_no_pass_measures_is_a_candidate_and_each_once():
    found = search("best", *SERIES[:3])
    again = search("again", *SERIES[1:])
    passes = [Pass(alone(SERIES[0]), SPECS), found, again]
    assert candidates_of(passes[:1]) == ()
    candidates = candidates_of(passes)
    assert [one.subject for one in candidates] == [alone(one) for one in SERIES[1:]]
    assert {one.schemes for one in candidates} == {(SPECS[1],)}  # that of the search alone
    assert not any(one.full_precision or one.draw for one in candidates)
    assert candidates[0].price == Price(flops=20.0, nbytes_read=101, streams=2)
    # They are told by scheme, and no other draw measures one.
    first, some = alone(SERIES[0]), SERIES[:2]
    candidates = candidates_of([search("a", *some), search("b", *some, scheme=SPECS[0])])
    assert [one.schemes for one in candidates] == [(s,) for s in reversed(SPECS) for _ in some]
    others = [Pass(first, SPECS, draw=1), Pass(first, SPECS, perturbed=True)]
    candidates = candidates_of([*others, search("best", *some)])
    assert [one.subject.label for one in candidates] == [one.label for one in some]
