from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qaudit.engine.batches import backwards, make_batches
from qaudit.types import Window


def windows_of(lengths):
    return [Window(i, np.arange(1, n + 1, dtype=np.int32) + 100 * i) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(2, 64), min_size=1, max_size=40), st.integers(16, 512))
def test_every_window_goes_through_exactly_once_and_whole(lengths, tokens_per_batch):
    windows = windows_of(lengths)
    batches = make_batches(windows, context=64, tokens_per_batch=tokens_per_batch)
    assert sorted(w for b in batches for w in b.windows) == list(range(len(windows)))
    for batch in batches:
        for row, (w, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
            assert batch.tokens_BT[row, :length].tolist() == windows[w].tokens.tolist()
            assert (batch.tokens_BT[row, length:] == int(windows[w].tokens[-1])).all()


@given(st.lists(st.integers(2, 64), min_size=1, max_size=40))
def test_a_batch_is_no_larger_than_allowed_unless_it_is_one_window(lengths):
    for batch in make_batches(windows_of(lengths), context=64, tokens_per_batch=128):
        assert batch.tokens_BT.numel() <= 128 or len(batch.windows) == 1


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
