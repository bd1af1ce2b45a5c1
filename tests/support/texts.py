"""Tokenizers and texts that take no time."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ["the cat sat on the mat and the dog sat on the cat", "caf\u00e9 na\u00efve \U0001f600 ok"]


def byte_level(*, own_bos: bool = False) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    if own_bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", model_max_length=8
    )


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer that throws spaces away and knows no BOS."""
    level = Tokenizer(models.WordLevel({"?": 0, "a": 1, "bb": 2}, unk_token="?"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=level, unk_token="?")


BYTES, OWN_BOS, WORDS = byte_level(), byte_level(own_bos=True), words()


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
