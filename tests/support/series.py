"""The series of one target, a Hub that is opened, and soups as `qaudit soup` writes them."""

import pytest

from qaudit.checkpoints.folder import find_all as find_folders
from qaudit.engine.block_pass import open_weights
from qaudit.export import contents, soup
from qaudit.hub import Hub
from qaudit.hub.api import Client
from qaudit.hub.fetch import Fetcher
from qaudit.hub.listing import Listing
from qaudit.hub.series import find_all
from qaudit.types import SILENT


def opened(server, watch=SILENT, **options):
    """Open a Hub as a new process would, which never waits."""
    client = Client(server.url, pause=lambda seconds: None, **options)
    listing = Listing(client)
    return Hub(client, listing, Fetcher(client, listing, watch=watch, pause=lambda seconds: None))


def find_series(listing, target, recipe=None):
    """Return the checkpoints of one target in the order in which they were trained."""
    return find_all([target], recipe, lambda: listing)


def find_checkpoints(target, recipe=None, *, hashed=True):
    """Return the checkpoints of one folder in the order in which they were trained."""
    return find_folders([str(target)], recipe, hashed=hashed)


def write_soup(subject, out, shard_nbytes=soup.SHARD_NBYTES):
    contents.must_be_new(out)
    with contents.begun_folder(out, "a soup") as begun, pytest.MonkeyPatch.context() as patched:
        patched.setattr(soup, "SHARD_NBYTES", shard_nbytes)
        weights = open_weights(subject, allow_pickle=False)
        return soup.write_soup(subject, out, weights, begun)
