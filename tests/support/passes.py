"""One pass over a tiny model, and the losses of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.read_out import document_sums
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.types import Corpus, EvaluationDocument, Protocol, Window

CPU = torch.device("cpu")


CONTEXT = 48


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": CONTEXT,
}


CONFIGS = {"llama": LlamaConfig, "olmo2": Olmo2Config}

# Of the fixture `checkpoint`, for what does not depend on where a block has its norms.
on_llama = pytest.mark.parametrize("checkpoint", ["llama"], indirect=True, scope="module")


# With every kind of calibration but whole blocks, with caches and with rotations.
SCHEMES = (
    "rtn-4bit:group=32", "rtn-2bit:group=32", "rtn-3bit:group=-1", "bnb-nf4", "gptq-3bit:group=32",
    "awq-4bit:group=32", "gptaq-3bit:group=32", "qronos-4bit:group=32",
    "gptq-3bit:group=32:true_sequential=false", "rtn-4bit:group=32:kv=int8",
    "rtn-4bit:group=32:kv=int4", "rtn-4bit:group=32:kv=fp8", "quarot-rtn-4bit:act=16:kv=int4",
)  # fmt: skip


def save(folder, family):
    """Save a random model."""
    torch.manual_seed(0)
    config = CONFIGS[family](**SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def windows(count, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(5, CONTEXT + 1, count)
    return [Window(i, random.integers(3, 250, n).astype(np.int32)) for i, n in enumerate(lengths)]


EVALUATION, CALIBRATION = windows(7, 1), windows(9, 2)
DOCUMENTS = (EvaluationDocument(f"d{k}", f"{k}" * 64, 40) for k in range(len(EVALUATION)))
CORPUS = Corpus(Protocol(CONTEXT, CONTEXT), (), tuple(EVALUATION), tuple(DOCUMENTS))


def feed(tokens_per_batch=160):
    both = CALIBRATION, EVALUATION
    return Feed(*(make_batches(windows, CONTEXT, tokens_per_batch) for windows in both))


def opened(folder, dtype=torch.float32, device=CPU, **options):
    """Return a model as blocks."""
    weights, device = WeightFolder(folder), torch.device(device)
    return BlockModel(folder, weights, dtype=dtype, device=device, **options)


def tallies_of(model, schemes, spill, given=None, limit=10**9, device_limit=0, **more):
    """Return the tallies of a pass over a model, or over one in a folder."""
    model = model if isinstance(model, BlockModel) else opened(model)
    schemes = parse_schemes([schemes]) if isinstance(schemes, str) else schemes
    with HiddenStates(spill, limit, model.device, device_limit) as states:
        return dict(run_blocks(model, given or feed(), schemes, states, **more))


def run(model, schemes, spill, limit=10**9, given=None, **more):
    """Return the losses of documents under each scheme, and the tallies of the pass."""
    tallies = tallies_of(model, schemes, spill, given, limit, **more)
    return {name: losses(given or feed(), tally) for name, tally in tallies.items()}, tallies


def finished(spill, folder):
    """Run a pass under all schemes; return losses, tallies and `linears`.

    Of each scheme, block and linear: the inputs that it was given, and what it made of it.
    """
    linears = {}

    def observe(scheme, given, quantized):
        for name, weight in quantized.weights.items():
            linears[scheme.spec, given.block, name] = given.inputs, weight.clone()

    found, tallies = run(folder, ",".join(SCHEMES), spill, observe=observe)
    return SimpleNamespace(losses=found, tallies=tallies, linears=linears)


def spec_of(text):
    return parse_scheme(text).spec


def plain_model(folder, scheme=None):
    """Return a model of the library, its linears quantized by a scheme that needs no text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.model.layers.modules() if scheme else ():
        if isinstance(module, torch.nn.Linear):
            quantized = scheme.quantize(Linears({"w": module.weight.data}))
            module.weight.data = quantized.weights["w"]
    return model


@torch.no_grad()
def plain_losses(model):
    """Return the losses of whole windows by a model of the library."""
    sums = []
    for window in EVALUATION:
        tokens_1T = torch.from_numpy(window.tokens.astype("int64"))[None]
        logits_TV = model(input_ids=tokens_1T, use_cache=False).logits[0, :-1].double()
        nll = torch.nn.functional.cross_entropy(logits_TV, tokens_1T[0, 1:], reduction="sum")
        sums.append(float(nll))
    return np.array(sums)


def losses(given, tally):
    return document_sums(given.evaluation, tally.nll, EVALUATION, len(EVALUATION))[0]
