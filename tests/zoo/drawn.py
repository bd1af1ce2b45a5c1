"""Drawn configurations and drawn texts of a type, held against plain transformers.

A draw edits a few keys of a tiny configuration, as files of strangers do: flags are turned over,
numbers changed, keys of other types added. Documents of drawn lengths and the options of items go
through the audit together, and through plain transformers one at a time. Every loss is the same,
or the file is refused by name.
"""

import copy
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from qaudit.engine.batches import make_batches
from qaudit.engine.read_out import document_sums
from qaudit.engine.tokens import Feed
from qaudit.errors import QauditError
from qaudit.model.proven import pad_until
from qaudit.types import FULL_PRECISION, Window
from tests.zoo import tiny
from tests.zoo.audit import line_of, tallies_of

TOLERANCE = 1e-4
_LONGEST, _TOGETHER = 80, 192
_Draw = Callable[[random.Random], Any]


def _one_of(*values):
    return lambda draw: draw.choice(values)


def _layers(*kinds):
    return lambda draw: [draw.choice(kinds) for _ in range(4)]


def _rotation(draw):
    kinds = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "longrope": {
            "short_factor": [1.0 + k / 8 for k in range(16)],
            "long_factor": [2.0 + k for k in range(16)],
            "original_max_position_embeddings": 48,
        },
    }  # fmt: skip
    kind = draw.choice(list(kinds))
    return {"rope_type": kind, "rope_theta": draw.choice([500.0, 10000.0]), **kinds[kind]}


_KEYS = {
    "rope_parameters": _rotation,
    "max_position_embeddings": _one_of(40, 48, 96, 256),
    "sliding_window": _one_of(None, 6, 16, 48),
    "use_sliding_window": _one_of(True, False),
    "layer_types": _layers("full_attention", "sliding_attention"),
    "attention_chunk_size": _one_of(8, 32),
    "output_router_logits": _one_of(True),
    "output_hidden_states": _one_of(True),
    "return_dict": _one_of(False),
    "logit_scale": _one_of(None, 0.5, 2.0),
    "final_logit_softcapping": _one_of(None, 20.0),
    "attn_logit_softcapping": _one_of(None, 20.0),
    "rms_norm_eps": _one_of(0.0, 1e-2),
    "tie_word_embeddings": _one_of(True, False),
    "pad_token_id": _one_of(None, 0, 7),
    "hidden_act": _one_of("silu", "gelu", "relu", "gelu_pytorch_tanh"),
}
_NOT_TURNED = {"is_encoder_decoder", "is_decoder", "use_cache", "add_cross_attention"}


def edits(table, draw):
    """Return changes of a few keys of a configuration, and keys that it has not."""
    flags = [k for k, v in table.items() if isinstance(v, bool) and k not in _NOT_TURNED]
    numbers = [k for k, v in table.items() if type(v) is float]
    changes = {}
    for _ in range(draw.randint(1, 4)):
        kind = draw.random()
        if kind < 0.2 and flags:
            changes[name] = not table[name := draw.choice(flags)]
        elif kind < 0.4 and numbers:
            changes[name] = table[name := draw.choice(numbers)] * draw.choice([0.5, 2.0])
        else:
            name = draw.choice(list(_KEYS))
            changes[name] = _KEYS[name](draw)
    return changes


def save(folder, model_type, changes):
    """Save a random model of a changed configuration, which is stored as it was changed.

    Flags that a model cannot be built with, or saved, are those of the stored file alone.
    """
    config = tiny.config_of(model_type)
    table = config.to_dict()
    text = next((table[part] for part in tiny.TEXT_PARTS if part in table), table)
    text |= changes
    if "layer_types" in changes:
        count = text.get("num_hidden_layers") or len(changes["layer_types"])
        text["layer_types"] = changes["layer_types"][:count]
    try:
        tiny.save_config(folder, type(config).from_dict(copy.deepcopy(table)))
    except Exception:  # noqa: BLE001 - a library that refuses it saves it unchanged
        tiny.save_config(folder, config)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    part = next((stored[p] for p in tiny.TEXT_PARTS if p in stored), stored)
    part |= {key: text[key] for key in changes}
    path.write_text(json.dumps(stored))


def documents(draw, lengths):
    return [Window(k, _tokens(draw, n)) for k, n in enumerate(lengths)]


def options(draw, *, example, items):
    """Return the options of items under one example."""
    before, texts = _tokens(draw, example), list[np.ndarray]()
    for _ in range(items):
        context = np.concatenate([before, _tokens(draw, draw.randint(1, 12))])
        texts += [
            np.concatenate([context, _tokens(draw, draw.randint(1, 9))])
            for _ in range(draw.randint(2, 3))
        ]
    return [Window(k, text, len(text) - 1) for k, text in enumerate(texts)]


def _tokens(draw, count):
    return np.array([draw.randint(20, 1999) for _ in range(count)], np.int32)


@torch.no_grad()
def plain_losses(model, documents, items):
    """Return the losses of what windows score, each read by a model that read nothing before.

    The last token of an option is not read: that is how lm-eval has it.
    """
    losses = []
    for window in (*documents, *items):
        tokens = torch.from_numpy(window.tokens).long()
        read = tokens[None] if window in documents else tokens[None, :-1]
        # Some types mask nothing where attentions are returned.
        returned = {"output_attentions": False, "return_dict": True, "use_cache": False}
        logits = copy.deepcopy(model)(input_ids=read, **returned).logits
        predicted = logits[0, : len(tokens) - 1].double()
        nll = torch.nn.functional.cross_entropy(predicted, tokens[1:], reduction="none")
        losses.append(float(nll[window.scored_from - 1 :].sum()))
    return losses


def audited_losses(folder, scratch, documents, items):
    """Return the losses of documents and of options by an audit."""
    batches = make_batches(documents, _LONGEST, _TOGETHER, pad_until([folder]))
    feed = Feed((), batches, items=[items] if items else ())
    tally = tallies_of(folder, scratch, feed)[FULL_PRECISION]
    losses = document_sums(batches, tally.nll, documents, len(documents))[0].tolist()
    return losses + (tally.options[0].tolist() if tally.options is not None else [])


def result_of(model_type, seed):
    """Return what a draw of a type gives: equal, refused, wrong or not tried."""
    draw = random.Random(f"{model_type} {seed}")
    try:
        table = tiny.config_of(model_type).to_dict()
    except Exception as error:  # noqa: BLE001 - a type that cannot be made is not tried
        return {"is": "not tried", "reason": f"{type(error).__name__}: {error}"[:160]}
    changes = edits(next((table[p] for p in tiny.TEXT_PARTS if p in table), table), draw)
    lengths = [draw.randint(2, _LONGEST) for _ in range(draw.randint(1, 5))]
    items = options(draw, example=draw.randint(1, 50), items=draw.randint(0, 2))
    result = compare(model_type, changes, documents(draw, lengths), items)
    return {"changes": changes, "lengths": lengths, **result}


def compare(model_type, changes, texts, items):
    """Return whether losses of an edited configuration are those of plain transformers."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        try:
            save(folder, model_type, changes)
        except Exception as error:  # noqa: BLE001 - nobody could have trained it
            return {"is": "not tried", "reason": line_of(error, folder)}
        try:
            # As files are opened, by which a `mistral` with layer types is a `ministral`.
            kind = tiny.class_of(AutoConfig.from_pretrained(folder))
            model = kind.from_pretrained(folder, dtype=torch.float32).eval()
            wanted = plain_losses(model, texts, items)
        except Exception as error:  # noqa: BLE001 - then it is refused, or runs
            wanted, failure = [], line_of(error, folder)
        try:
            losses = audited_losses(folder, Path(temporary), texts, items)
        except Exception as error:  # noqa: BLE001 - a crash is a result
            kind = "refused" if isinstance(error, QauditError) else "wrong"
            return {"is": kind, "reason": line_of(error, folder)}
    if not wanted:
        return {"is": "runs", "reason": f"plain transformers do not: {failure}"}
    same = np.isclose(losses, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if same.all():
        return {"is": "equal"}
    apart = [(k, losses[k], wanted[k]) for k in np.flatnonzero(~same).tolist()]
    return {"is": "wrong", "reason": f"of {len(texts)} documents and then options: {apart}"}
