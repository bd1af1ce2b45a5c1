"""Where the Hub is, who we are and whether it may be asked at all, as the environment says.

Read at every call, by the variables of the client's own library: two clients of one process may
be told different things, and nothing that was set after a module was loaded is missed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from huggingface_hub import get_token
from huggingface_hub.errors import OIDCError

from qaudit.errors import HubError

ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True)
class Settings:
    """What a client is told; the token is in no text that is made of this."""

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool
    timeout_seconds: float


def settings_of_the_environment() -> Settings:
    """Read what is set now."""
    offline = _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE")
    anonymous = offline or _is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    return Settings(
        endpoint=os.environ.get("HF_ENDPOINT") or ENDPOINT,
        token=None if anonymous else _token(),
        offline=offline,
        timeout_seconds=_seconds(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "")),
    )


def _token() -> str | None:
    """Return the token that the person who runs this is logged in with."""
    try:
        return get_token()
    except (OSError, ValueError, OIDCError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise HubError(
            f"the token for the Hub cannot be read: {why.lower()}",
            hint="log in again with `hf auth login`, or set `HF_TOKEN`",
        ) from None  # whatever was read is not for a log


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"[1-9]\d{0,4}", text) else 30.0


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
