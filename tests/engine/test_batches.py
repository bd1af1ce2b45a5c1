"""Batches of windows, and trees of items that are read as their sequences alone.

Trees are for every family that may read them; others never do.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.configuration import read_configuration
from qaudit.engine.batches import backwards, make_batches, make_item_batches
from qaudit.engine.tokens import Feed
from qaudit.items.tokens import PADDED, ItemText
from qaudit.model.blocks import BlockModel
from qaudit.model.proven import BRANCHING, reads_trees
from qaudit.types import FULL_PRECISION, Item, Window
from tests.support import tiny
from tests.support.passes import CPU, opened, tallies_of


def windows_of(lengths):
    return [Window(i, np.arange(1, n + 1, dtype=np.int32) + 100 * i) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(2, 64), min_size=1, max_size=40), st.integers(16, 512))
def test_every_window_goes_through_exactly_once_and_whole(lengths, tokens_per_batch):
    windows = windows_of(lengths)
    batches = make_batches(windows, context=64, tokens_per_batch=tokens_per_batch)
    assert sorted(w for b in batches for w in b.windows) == list(range(len(windows)))
    for batch in batches:
        assert batch.tokens_BT.numel() <= max(tokens_per_batch, 64) or len(batch.windows) == 1
        for row, (w, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
            assert batch.tokens_BT[row, :length].tolist() == windows[w].tokens.tolist()
            assert (batch.tokens_BT[row, length:] == int(windows[w].tokens[-1])).all()


def test_padding_is_not_valid_and_never_longer_than_the_context():
    (batch,) = make_batches(windows_of([10, 47]), context=48)
    assert batch.tokens_BT.shape == (2, 48)
    assert batch.valid_BT().sum(1).tolist() == [47, 10]
    (longer,) = make_batches(windows_of([18]), context=8)  # options are as long as they are
    assert longer.tokens_BT.shape == (1, 18)


def test_backwards_holds_the_same_windows_with_what_belongs_to_them():
    windows = [
        replace(window, scored_from=k + 1, roles=np.full(len(window.tokens), k % 3, np.int8))
        for k, window in enumerate(windows_of([9, 30, 12, 40, 11, 10]))
    ]
    batches = make_batches(windows, context=64, tokens_per_batch=128)
    turned = backwards(batches)
    assert len(turned) > 1
    assert [w for b in turned for w in b.windows] == [w for b in batches for w in b.windows][::-1]
    for batch in turned:
        for row, (w, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
            assert batch.tokens_BT[row, :length].tolist() == windows[w].tokens.tolist()
            assert batch.roles_BT[row, :length].tolist() == windows[w].roles.tolist()
            assert batch.starts[row] == windows[w].scored_from


# ---------------------------------------------------------------- trees of items

WHOLE = {"mistral": {"sliding_window": None}}
"""What makes a family read all of its text, where its tiny model reads a part."""


def options():
    """Return four items of three options under one example, and an option twice."""
    random = np.random.default_rng(5)
    example, drawn = random.integers(3, 250, 30), []
    for _ in range(4):
        context = [*example, *random.integers(3, 250, 12)]
        drawn += [[*context, *random.integers(3, 250, n)] for n in (1, 4, 7)]
    drawn.append(drawn[1])
    return [Window(k, np.array(one, np.int32), 42) for k, one in enumerate(drawn)]


@pytest.mark.parametrize("family", sorted(BRANCHING))
def test_a_tree_gives_the_losses_of_its_sequences(family, once, tmp_path, monkeypatch):
    folder = once(tiny.make, family)
    if family in WHOLE:
        folder = tiny.make(tmp_path / "model", family, **WHOLE[family])
    model, feed = opened(folder), Feed((), (), items=(options(),))
    assert model.takes_branches(80)
    assert reads_trees(read_configuration(folder))
    trees = tallies_of(model, [], tmp_path / "spill", feed)
    monkeypatch.setattr(BlockModel, "takes_branches", lambda *_: False)
    alone = tallies_of(model, [], tmp_path / "spill", feed)
    trees, alone = (tallies[FULL_PRECISION].options[0] for tallies in (trees, alone))
    # The same fp32 arithmetic in other kernels: rounding only, on sums of up to 60 nats.
    np.testing.assert_allclose(trees, alone, rtol=0, atol=1e-4)


def test_a_plan_knows_from_the_configuration_whether_a_model_reads_trees():
    for config, reads in (
        ({"model_type": "llama"}, True),
        ({"model_type": "mistral"}, False),  # 4096 where the file names none
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, True),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, False),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"model_type": "bloom"}, False),
        ({"model_type": ["llama"]}, False),
        ({}, False),
    ):
        assert reads_trees(config) is reads, config


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=70)


@given(st.lists(sequences, min_size=1, max_size=5))
def test_a_plan_counts_what_a_model_without_trees_is_fed(options):
    some = [Window(k, np.array([*one, 9], np.int32), len(one)) for k, one in enumerate(options)]
    text = ItemText((Item("t", "t:0", len(some), (0,)),), tuple(some))
    fed = [
        -(-(int(row.max()) + 1) // PADDED) * PADDED
        for batch in make_item_batches([some], branches=False)
        for row in batch.positions_BT
    ]
    assert text.tokens(trees=False) == sum(fed)


def fed(batches):
    """Return how many tokens are fed without padding, each of which is behind a first one."""
    return sum(int((b.positions_BT > 0).sum()) + len(b.positions_BT) for b in batches)


def test_a_shared_token_is_fed_once():
    some = options()
    batches = make_item_batches([some], branches=True)
    assert fed(batches) == 30 + 4 * (12 + 0 + 3 + 6)
    alone = make_item_batches([some], branches=False)  # one-token options and twins are fed once
    assert fed(alone) < sum(len(window.tokens) - 1 for window in some)
    assert sum(batch.branched for batch in batches) == len(batches) == 1
    assert sorted(np.unique(batches[0].options_Q).tolist()) == list(range(13))


def test_a_row_sees_what_is_before_it_in_its_own_sequence_and_nothing_else():
    (batch,) = make_item_batches([options()], branches=True)
    mask_TT = batch.mask(torch.float32, CPU)[0, 0] == 0
    tokens_T, positions_T = batch.tokens_BT[0], batch.positions_BT[0]
    sequences = {tuple(window.tokens[:-1].tolist()) for window in options()}
    size = fed([batch])
    for row in range(size):
        seen = torch.nonzero(mask_TT[row]).squeeze(1)
        assert positions_T[seen].tolist() == list(range(int(positions_T[row]) + 1))
        read = tuple(tokens_T[seen].tolist())
        assert any(sequence[: len(read)] == read for sequence in sequences)
    assert all(torch.nonzero(mask_TT[row]).tolist() == [[row]] for row in range(size, len(mask_TT)))
