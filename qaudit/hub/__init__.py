"""The Hub: repositories -> checkpoints and texts on this machine, verified.

    entries <- answers <- client <- listing <- {series, texts, fetch}

Nothing heavy is imported until a Hub is opened: a local audit, and every report, never needs
to know how to speak to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qaudit.hub.client import Client
    from qaudit.hub.fetch import Fetcher, Watch
    from qaudit.hub.listing import Listing


@dataclass(frozen=True)
class Hub:
    """Whom to ask, what is known already, and who fetches."""

    client: Client
    listing: Listing
    fetcher: Fetcher


def open_hub(watch: Watch | None = None) -> Hub:
    """Open the Hub that the environment names; nothing is asked of it yet."""
    from qaudit.hub.client import Client
    from qaudit.hub.fetch import SILENT, Fetcher
    from qaudit.hub.listing import Listing

    watch = watch or SILENT
    client = Client.from_environment(say=watch.said)
    listing = Listing(client)
    return Hub(client, listing, Fetcher(client, listing, watch=watch))
