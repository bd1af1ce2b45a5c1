"""A text of a few tokens to train on."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from qaudit.lab.text import TokenStream


@pytest.fixture(scope="session")
def text() -> TokenStream:
    words = {f"w{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)))
    tokens = np.tile(np.arange(64, dtype=np.uint16), 20)
    return TokenStream(tokens=tokens, tokenizer=tokenizer, key="t" * 64, tokenizer_key="w" * 64)
