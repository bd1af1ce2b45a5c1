"""Soups of folders, written as `qaudit soup` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qaudit.engine.block_pass import open_weights
from qaudit.export import contents, soup
from qaudit.types import Subject


def write_soup(subject: Subject, out: Path, shard_nbytes: int = soup.SHARD_NBYTES) -> Path:
    contents.must_be_new(out)
    with contents.begun_folder(out, "a soup") as begun, pytest.MonkeyPatch.context() as patched:
        patched.setattr(soup, "SHARD_NBYTES", shard_nbytes)
        weights = open_weights(subject, allow_pickle=False)
        return soup.write_soup(subject, out, weights, begun)
