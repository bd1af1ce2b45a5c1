"""What links blocks beside hidden states: found, kept for later blocks, never written into."""

from collections import UserDict

import pytest
import torch
from torch import nn

from qaudit.checkpoints.configuration import read_configuration
from qaudit.errors import ModelError
from qaudit.model.links import (
    Arguments,
    Carried,
    Form,
    Links,
    Store,
    WideRows,
    beside,
    form_of,
    leave,
)
from qaudit.model.structure import Fold, all_numbers, true_folds
from qaudit.planning.sizes import Sizes, beside_notes, with_config
from tests.support import tiny
from tests.support.filled import filled
from tests.support.passes import opened
from tests.support.tiny import header_sizes

STORE = {"later": frozenset({"store0"}), "after": {"store": Store("store0", UserDict)}}


class Keeps(nn.Module):
    """Adds to what the block before stored, in place, and stores something new."""

    def forward(self, hidden_BTD, store):
        if "total" in store:
            store["total"] += 1
        store["pair"] = (hidden_BTD[..., :2], None)
        store.setdefault("total", hidden_BTD.sum(-1))
        store[3] = hidden_BTD
        return hidden_BTD * 2


def links_of(first, other, moved):
    recorded = ({0: Arguments(after={}), 1: Arguments(after=a)} for a in (first, other, moved))
    these, others, those = recorded
    return Links.of(these, others, lambda: those)


class Reads(nn.Module):
    def forward(self, hidden_BTD, store):
        pair, nothing = store["pair"]
        assert nothing is None and torch.equal(store[3], hidden_BTD / 2)
        assert isinstance(store, UserDict) and store.keys() == {"pair", "total", 3}
        return torch.cat([pair, pair], -1)


def test_a_store_has_what_was_left_in_it_and_a_block_that_runs_twice_does_not_see_what_it_wrote():
    hidden_BTD = torch.randn(2, 3, 4)
    first = Arguments(**STORE).call(Keeps(), hidden_BTD)
    called = Arguments(after=STORE["after"], beside=beside(first))
    out_BTD = called.call(Reads(), first)
    assert torch.equal(out_BTD[..., 2:], hidden_BTD[..., :2])
    assert not beside(out_BTD)  # no block is behind it
    called = Arguments(**STORE, index=1, beside=beside(first))
    before = {name: tensor.clone() for name, tensor in beside(first).items()}
    for _ in range(2):
        second = called.call(Keeps(), first)
        total_BT = beside(second)["store0:total/"]
        assert torch.equal(total_BT, hidden_BTD.sum(-1) + 1)
    assert beside(first).keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in filled(beside(first).items()))
    # A block that is not given a store passes it on.
    between = Arguments(later=STORE["later"], index=1, beside=beside(first))
    assert beside(between.call(nn.Tanh(), first)).keys() == before.keys()


def test_what_a_block_returns_waits_until_no_later_block_reads_it():
    class Returns(nn.Module):
        def forward(self, hidden_BTD):
            return hidden_BTD, hidden_BTD.argmax(-1), None, 7

    names = [f"returned0.{place}" for place in (1, 2, 3)]
    out_BTD = Arguments(later=frozenset(names[:2])).call(Returns(), torch.ones(1, 2, 4))
    assert beside(out_BTD).keys() == set(names[:2])
    taken = []

    class Takes(nn.Module):
        def forward(self, hidden_BTD, *values):
            taken.extend(values)
            return hidden_BTD

    places = tuple(map(Carried, names[:2]))
    Arguments(places, index=1, beside=beside(out_BTD)).call(Takes(), out_BTD)
    assert torch.equal(taken[0], torch.zeros(1, 2, dtype=torch.long)) and taken[1] is None
    with pytest.raises(ModelError, match="what block 0 returns for later blocks is a `int`"):
        Arguments(later=frozenset(names)).call(Returns(), torch.ones(1, 2, 4))


def test_links_are_told_from_what_all_batches_share():
    mask, store = torch.ones(2), UserDict()
    same = {"mask": mask, "store": store, "kinds": {"full": mask}, "state": Carried("returned0.1")}
    links = links_of(*({**same, "own": torch.full((2,), own)} for own in (1.0, 0.0, 1.0)))
    own = torch.full((2, 4), 3.0)[:, 0]
    settled, given = links.settle({1: Arguments(after={**same, "own": own})}, None)
    after = settled[1].after
    assert after["mask"] is mask and after["kinds"] == {"full": mask}
    assert after["store"] == Store("store0", UserDict)
    assert after["state"] == Carried("returned0.1")
    assert [tensor.tolist() for tensor in given.values()] == [[3.0, 3.0]]
    assert next(iter(given.values())).is_contiguous()  # a view keeps all in memory
    assert links.given(1) == given.keys() == links.passed(1) and not links.passed(0)
    assert links.later(0) == {"store0", "returned0.1", *given}
    # What several blocks are given of tokens waits for the last of them.
    numbers = torch.ones(2), torch.zeros(2)
    some, others = ({k: Arguments(after={"x": one}) for k in (0, 1)} for one in numbers)
    links = Links.of(some, others, lambda: some)
    (name,) = links.given(0)
    assert (links.passed(0), links.passed(1)) == (frozenset(), {name})


@pytest.mark.parametrize(
    ("first", "other", "moved", "message"),
    [
        (object(), object(), object(), "block 1 is given a `object`, which may carry state"),
        (1, 2, 1, "what block 1 is given depends on the tokens"),
        (torch.ones(1), torch.zeros(1), torch.zeros(1), "computed from hidden states between"),
    ],
)
def test_what_cannot_be_kept_is_refused(first, other, moved, message):
    with pytest.raises(ModelError, match=message):
        links_of({"x": first}, {"x": other}, {"x": moved})


def test_hidden_states_of_four_dimensions_are_some_for_each_token():
    for form in (Form(0, (4, 5)), Form(1, (4, 5))):
        hidden_BTD = torch.randn(2, 3, 20)
        full = form.full(hidden_BTD)
        assert full.shape == ((2, 3, 4, 5) if form.place == 0 else (4, 2, 3, 5))
        assert form_of(full, (2, 3)) == form
        assert torch.equal(form.flat(full), hidden_BTD)
        assert full.is_contiguous()  # blocks view what they are given in other shapes
    with pytest.raises(ModelError, match="not some for each token"):
        form_of(torch.zeros(2, 4, 3, 5), (2, 3))


class SharesValues(nn.Module):
    """Leaves what `v` makes for a later block, which has an `o` of its own."""

    def __init__(self):
        super().__init__()
        self.v, self.o = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, hidden_BTD, store=None):
        values_BTD = self.v(hidden_BTD)
        if store is not None:
            store["values"] = values_BTD
        return hidden_BTD + self.o(values_BTD)


@torch.no_grad()
def test_a_scale_is_not_folded_into_what_a_later_block_reads():
    torch.manual_seed(0)
    block, hidden_BTD = SharesValues(), torch.randn(1, 4, 8)
    fold = Fold(("o",), "v", 0, torch.arange(8))

    def run(module, **links):
        return all_numbers(Arguments(**links).call(module, hidden_BTD))

    assert true_folds(block, run, [fold]) == (fold,)
    assert true_folds(block, lambda module: run(module, **STORE), [fold]) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_beside_hidden_states_is_cut_as_windows_are(dtype):
    hidden_BTD, keys = torch.randn(3, 5, 4).to(dtype), torch.randn(3, 2, 5, 6).to(dtype)
    tokens = torch.arange(15).view(3, 5)
    nothing = torch.zeros(0, dtype=torch.bool)
    tensors = {"keys": keys, "tokens": tokens, "nothing": nothing, "scale": hidden_BTD[..., 0]}
    kept = leave(hidden_BTD, tensors)
    rows = WideRows.of(kept)
    part = rows.split(rows.join(kept)[1:2, :3])
    assert torch.equal(part, hidden_BTD[1:2, :3])
    cut = beside(part)
    assert torch.equal(cut["keys"], keys[1:2, :, :3])
    assert torch.equal(cut["tokens"], tokens[1:2, :3])
    assert torch.equal(cut["scale"], hidden_BTD[1:2, :3, 0]) and cut["nothing"] is nothing
    for tensor in (torch.zeros(3, 5, 5), torch.zeros(3, 5, dtype=torch.float64), torch.zeros(1, 5)):
        with pytest.raises(ModelError, match="cannot be cut"):
            WideRows.of(leave(hidden_BTD, {"x": tensor}))
    # What is left beside states is not beside those that they are equal to.
    after = leave(kept, {"values": torch.ones(1, 2)})
    assert (beside(kept).keys(), beside(after).keys()) == (tensors.keys(), {"values"})
    assert not beside(leave(kept, {})), "a block that hands on what it was given leaves nothing"
    called = Arguments((keys,), beside=tensors).to_float32()
    dtypes = [tensor.dtype for tensor in (*called.before, *called.beside.values())]
    assert dtypes == [torch.float32, torch.float32, torch.long, torch.bool, torch.float32]


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_a_plan_knows_what_waits_beside_hidden_states(family, once):
    folder = once(tiny.make, family)
    model = opened(folder)
    planned = with_config(header_sizes(folder), read_configuration(folder))
    hidden_BTD = model.embed(tiny.tokens(2, 20))
    given = sum(tensor.numel() for tensor in beside(hidden_BTD).values())
    assert given == 40 * planned.given
    most = 0
    for block in model.blocks():
        hidden_BTD = block.forward(hidden_BTD)
        shared = [tensor for name, tensor in beside(hidden_BTD).items() if ":" in name]
        most = max(most, hidden_BTD.numel() + sum(tensor.numel() for tensor in shared))
    assert most == 40 * (planned.hidden + planned.beside)
    (beside_note, given_note) = beside_notes(planned, 4, 2048)
    assert f"blocks leave {planned.beside:,} for later blocks" in beside_note
    assert "which all streams share" in given_note


def test_a_plan_counts_the_keys_that_the_last_blocks_read():
    """Of each kind of layer among these, and not among the first."""
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = {"layer_types": kinds, "num_kv_shared_layers": 2, "num_key_value_heads": 3,
              "head_dim": 5, "num_global_key_value_heads": 7, "global_head_dim": 11}  # fmt: skip
    sizes = Sizes(0, 4, 0, 0, 8, 8, 2)
    assert with_config(sizes, config).beside == 2 * 3 * 5
    assert with_config(sizes, {**config, "layer_types": kinds[::-1]}).beside == 2 * 7 * 11
