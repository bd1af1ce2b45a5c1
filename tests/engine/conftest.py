"""A tiny checkpoint of each of two architectures, and a folder for results."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qaudit.saved.results import ResultStore
from tests.support.passes import CONFIGS, SHAPE


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param](**SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "evidence")
