"""Copies beside what a GPU computes: the CPU's numbers, and wrong ones without any one wait."""

from __future__ import annotations

import linecache
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import qaudit
from qaudit.core.registry import parse_schemes
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.kept_weights import LinearHashes
from qaudit.errors import QauditError
from qaudit.model.device import _UNDER_WAY, Copies, HostCopy
from tests.support.passes import SHAPE, opened, run
from tests.support.pretended_device import pretended

CUDA = torch.device("cuda")
SCHEMES = "rtn-4bit"
ON_HOST, IN_FILES = 10**9, 0


class AtOnce:
    """Threads that have done what they were given before anything else happens."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def shutdown(self):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


@pytest.fixture(scope="module")
def three_blocks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def reads_and_hashes_at_once(monkeypatch):
    monkeypatch.setattr("qaudit.model.blocks.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr("qaudit.engine.kept_weights.ThreadPoolExecutor", AtOnce)


def numbers(place, folder, spill, limit):
    """Return the losses and hashes of a pass whose hidden states wait elsewhere."""
    with LinearHashes() as hashes:
        model = opened(folder, device=place)
        read, _ = run(model, SCHEMES, spill, limit, observe=hashes.observe)
    return read, [hashes.of(scheme.spec) for scheme in parse_schemes([SCHEMES])]


def are_equal(read, expected):
    same = all(np.array_equal(read[0][name], expected[0][name]) for name in expected[0])
    return same and read[1] == expected[1]


def source(site):
    path, _, line = site[1].partition(":")
    return linecache.getline(str(Path(qaudit.__file__).parent / path), int(line))


def without(site, folder, spill, limit):
    """Return the numbers of a pass in which a line that orders streams does nothing."""
    with pretended() as device:
        device.left_out = site
        try:
            return numbers(CUDA, folder, spill, limit), device.ordering
        except QauditError as error:  # what is not finite is refused
            return error, device.ordering


@pytest.mark.parametrize("limit", [ON_HOST, IN_FILES], ids=["on the host", "in files"])
def test_each_line_that_orders_streams_is_needed(limit, three_blocks, tmp_path):
    expected = numbers(torch.device("cpu"), three_blocks, tmp_path, limit)
    read, sites = without(None, three_blocks, tmp_path, limit)
    assert are_equal(read, expected)
    assert {name for name, _ in sites} == {"record", "wait_event", "record_stream"}
    for site in sorted(sites):
        if "_wait_for_the_oldest" in source(site):  # for memory alone: see below
            continue
        read, _ = without(site, three_blocks, tmp_path, limit)
        assert isinstance(read, Exception) or not are_equal(read, expected), site


def test_a_batch_is_on_its_way_while_another_is_computed():
    with pretended() as device:
        copies = Copies(CUDA)
        batches = [copies.to_host(torch.full((8,), float(k), device="cuda")) for k in range(3)]
        sums = [copies.to_device(batch).sum() for batch in batches]
        assert not device.waits
        assert [total.item() for total in sums] == [0, 8, 16]


def test_few_copies_are_under_way_at_once():
    nbytes = 4000
    with pretended() as device:
        copies = Copies(CUDA)
        for _ in range(20):
            copies.to_host(torch.ones(nbytes // 4, device="cuda"))
        assert device.reserved <= (_UNDER_WAY + 1) * nbytes
    with pretended() as device:
        copies, kept = Copies(CUDA), HostCopy(torch.ones(nbytes // 4))
        for _ in range(20):
            copies.to_device(kept).add_(1)
        assert device.reserved <= (_UNDER_WAY + 2) * nbytes


def test_a_batch_that_is_still_written_can_be_read_and_replaced(tmp_path):
    with pretended(), HiddenStates(tmp_path, IN_FILES, CUDA) as states:
        for k in range(3):
            states.put("a", 0, torch.full((8,), float(k), device="cuda"))
            assert states.get("a", 0).tolist() == [k] * 8
        states.put("a", 1, torch.zeros(8, device="cuda"))
        states.rename("a", "b")
        assert states.get("b", 1).tolist() == [0] * 8
        states.drop("b")
        assert not list(tmp_path.iterdir())


def test_pinned_states_count_as_the_powers_of_two_that_they_take(tmp_path):
    with pretended(), HiddenStates(tmp_path, 3000, CUDA) as states:
        for k in range(2):
            states.put("a", k, torch.zeros(300, device="cuda"))  # 1,200 bytes, which take 2,048
        assert states.nbytes_spilled == 1200
