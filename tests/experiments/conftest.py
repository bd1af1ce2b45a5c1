"""A text of a few tokens to train on, and the commands of the experiments."""

import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from experiments.__main__ import commands
from experiments.text import TokenStream
from qaudit.cli import main
from tests.support.cli import Outcome


@pytest.fixture(scope="session")
def text():
    words = {f"w{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)))
    tokens = np.tile(np.arange(64, dtype=np.uint16), 20)
    return TokenStream(tokens=tokens, tokenizer=tokenizer, key="t" * 64, tokenizer_key="w" * 64)


@pytest.fixture
def experiments(monkeypatch, capsys):
    """Return a function that runs `python -m experiments` with arguments, in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["experiments", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(commands)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err + shown.out
        return Outcome(int(end.value.code or 0), shown.out, shown.err)

    return run
