"""The Hub: repositories -> checkpoints and texts on this machine, verified.

    answers <- api <- listing <- {series, fetch <- cache} <- {publish, metadata}

Nothing heavy is imported until a Hub is opened: a local audit and every report work without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qaudit.types import SILENT, Watch

if TYPE_CHECKING:
    from qaudit.hub.api import Client
    from qaudit.hub.fetch import Fetcher
    from qaudit.hub.listing import Listing


@dataclass(frozen=True)
class Hub:
    """The client of a Hub, its listing with a memory, and what fetches files."""

    client: Client
    listing: Listing
    fetcher: Fetcher


def open_hub(watch: Watch | None = None) -> Hub:
    """Open the Hub that the environment names; no request is sent yet."""
    from qaudit.hub.api import Client
    from qaudit.hub.fetch import Fetcher
    from qaudit.hub.listing import Listing

    watch = watch or SILENT
    client = Client.from_environment(say=watch.note)
    listing = Listing(client)
    return Hub(client, listing, Fetcher(client, listing, watch=watch))
