"""Random models of two blocks, their tokenizer and text, as files."""

import json
import random

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 300
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WORDS = ("the", "quick", "fox", "jumps", "over", "a", "lazy", "dog", "while", "wizards", "box")


def text(seed, length=24):
    """Return a document of a few known words."""
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def write_documents(path, seeds):
    """Write documents as JSON lines."""
    lines = [json.dumps({"text": text(seed)}) for seed in seeds]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def save_tokenizer(folder, size=VOCABULARY):
    """Train a byte-level BPE tokenizer on a few strings and save it as checkpoints have it."""
    trained = ByteLevelBPETokenizer()
    corpus = [text(seed) for seed in range(40)]
    trained.train_from_iterator(corpus, vocab_size=size, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(folder)


def swap_words(folder):
    """Let two words of a tokenizer's vocabulary change places."""
    path = folder / "tokenizer.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    words = table["model"]["vocab"]
    first, second, *_ = words
    words[first], words[second] = words[second], words[first]
    path.unlink()  # it may be a link
    path.write_text(json.dumps(table), encoding="utf-8")


def save_model(folder, seed, family="llama", **changes):
    """Save a random model of two blocks, without a tokenizer."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
