"""Every registered scheme under many parameters, linears to quantize, and awkward models.

Parameter sets are made from a scheme's own fields: its defaults, every flag turned over, and
other bits, groups and block sizes where it has them.
"""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import yaml

from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme, schemes
from qaudit.errors import SchemeError

COLUMNS = 160
TRANSFORMS = ("flatquant", "spinquant", "ostquant")
LEARNED = (*TRANSFORMS, "base-q-w4a4")
FEW_STEPS = 3
OTHER_VALUES = {
    "bits": (8, 3),
    "group": (64, -1, 48),
    "blocksize": (128,),
    "threshold": (0.0,),
    "damp": (0.01,),
    "scale_dtype": ("float32", "bf16"),
    "rule": ("floor",),
    "alpha": (0.8,),
    "act": (8, 16),
    "format": ("mxfp4",),
    "clip": (1.0,),
    "keep": (4, 0),
    "down": (4,),
}


def parameter_sets(plugin):
    """Yield a scheme's default object and objects with one parameter changed.

    Transforms are learned in few steps: what a contract holds needs no good ones.
    """
    fields = dataclasses.fields(plugin)
    base = {"bits": 4} if any(field.name == "bits" for field in fields) else {}
    if plugin.name in LEARNED:
        base["steps"] = FEW_STEPS
    yield plugin(**base)
    for field in fields:
        values = OTHER_VALUES.get(field.name, ())
        if isinstance(field.default, bool):
            values = (not field.default,)
        for value in values:
            if value == field.default:
                continue
            try:
                yield plugin(**{**base, field.name: value})
            except SchemeError:  # two parameters that exclude each other
                continue


# Those that need the library of an extra are held to the contract in tests/peers.
PLUGINS = {name: plugin for name, plugin in schemes().items() if not plugin.extra}
ALL = [scheme for plugin in PLUGINS.values() for scheme in parameter_sets(plugin)]
PLAIN = [next(parameter_sets(plugin)) for plugin in PLUGINS.values()]
GROUPED = [scheme for scheme in PLAIN if hasattr(scheme, "group")]
every_grouped_scheme = pytest.mark.parametrize("scheme", GROUPED, ids=lambda scheme: scheme.short)
every_scheme = pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.short)
every_plain_scheme = pytest.mark.parametrize("scheme", PLAIN, ids=lambda scheme: scheme.short)


def example(dtype=torch.float32, *, fold=False, seed=0, rows=(12, 7)):
    """Two linears over common inputs, with some zeros and one row of zeros."""
    linears = _example(dtype, fold, seed, rows)
    inputs = {
        field.name: value.clone() if isinstance(value, torch.Tensor) else value
        for field in dataclasses.fields(linears.inputs)
        for value in [getattr(linears.inputs, field.name)]
    }
    weights = {name: weight.clone() for name, weight in linears.weights.items()}
    return dataclasses.replace(linears, weights=weights, inputs=Inputs(**inputs))


def output_error(linears, spec, x):
    """Return the squared error of what linears make of inputs, under a scheme."""
    quantized = parse_scheme(spec).quantize(linears)
    read = x if quantized.inputs is None else quantized.inputs(x)
    return sum(
        float((read @ quantized.weights[name].T - x @ weight.T).double().square().sum())
        for name, weight in linears.weights.items()
    )


@functools.cache
def _example(dtype, fold, seed, rows):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(600, COLUMNS, generator=generator)
    x *= torch.exp(torch.randn(COLUMNS, generator=generator))
    x = x @ (torch.eye(COLUMNS) + 0.3 * torch.randn(COLUMNS, COLUMNS, generator=generator) / 12)
    weights = {}
    for name, count in zip(("attn.q_proj", "attn.v_proj"), rows, strict=True):
        weight = 0.02 * torch.randn(count, COLUMNS, generator=generator)
        weight[3] = 0
        weight[5, 17] = 0
        weights[name] = weight.to(dtype)
    drift = 0.05 * torch.randn(x.shape, generator=generator) * x.abs().mean(0)
    largest = x.abs().amax(0)
    inputs = Inputs(x.T @ x, x.abs().mean(0), len(x), largest, drift.T @ x, x[::3])
    fold_C = torch.arange(COLUMNS) // 2 if fold else None
    return Linears(weights, inputs, fold_C, fold_is_norm=fold, block_has_norm_folds=True)


def transform_nbits(scheme, columns):
    """Count the matrices, scales and orders of columns in front of a scheme's linears."""
    if scheme.name == "duquant":  # two rotations of a block, a scale and a place of each column
        block = min(columns, scheme.block) if scheme.block > 0 else columns
        matrices = 2 * (columns // block * block**2 + (columns % block) ** 2)
        return 16 * (matrices + columns) + 32 * columns
    if scheme.name == "base-q-w4a4":  # a bias and a scale of each column; no norm is in front
        return 32 * columns
    if scheme.name in TRANSFORMS:
        left = max(a for a in range(1, columns + 1) if columns % a == 0 and a * a <= columns)
        scales = 0 if scheme.name == "spinquant" else columns
        return 16 * (left**2 + (columns // left) ** 2 + scales)
    return 0


TABLES = Path(__file__).with_name("families.yaml")
SHAPES = yaml.safe_load(TABLES.read_text(encoding="utf-8"))["awkward"]
NAMES = tuple(PLUGINS)
REFUSED = {
    ("smoothquant", "post-norm"): "no norm of block 0 can take the scales of `smoothquant`",
    **{(name, "odd"): "32" for name in NAMES if name.startswith("gguf-")},
}


def short(name):
    plugin = schemes()[name]
    has_bits = any(field.name == "bits" for field in dataclasses.fields(plugin))
    learned = [f.name for f in dataclasses.fields(plugin) if f.name in ("steps", "iters")]
    steps = f":{learned[0]}=2" if learned else ""
    return f"{name}-4bit{steps}" if has_bits else f"{name}{steps}"


def made(folder, shape):
    """Save a small random model."""
    from transformers import AutoConfig, AutoModelForCausalLM  # `make kernels` has none

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape])).save_pretrained(folder)
    return folder
