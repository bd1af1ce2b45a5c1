"""A run of a few thousand parameters, and a text of a few tokens."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from qaudit.lab.text import TokenStream


@pytest.fixture(scope="session")
def text():
    words = {f"w{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token="w0"
    )
    return TokenStream(
        tokens=np.tile(np.arange(64, dtype=np.uint16), 20),
        tokenizer=tokenizer,
        key="t",
        tokenizer_key="w",
    )
