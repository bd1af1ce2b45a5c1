"""Where the Hub is, who we are and whether it may be asked at all, as the environment says.

Read at every call, by the variables of the client's own library: two clients of one process may
be told different things, and nothing that was set after a module was loaded is missed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from qaudit.errors import HubError, UsageError

ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True)
class Settings:
    """What a client is told; the token is in no text that is made of this."""

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool
    timeout_seconds: float


def check_variables() -> None:
    """Refuse values that the client's library could not be imported with."""
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        value = os.environ.get(name)
        if value is not None and not re.fullmatch(r"\s*[1-9]\d{0,4}\s*", value):
            raise UsageError(
                f"`{name}` is `{ascii(value)[1:-1][:60]}`, which is not a number of seconds",
                hint=f"set `{name}` to a whole number from 1 to 99999, or unset it",
            )


def settings_of_the_environment() -> Settings:
    """Read what is set now."""
    check_variables()
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
    from huggingface_hub import get_token
    from huggingface_hub.errors import OIDCError

    try:
        return get_token()
    except (OSError, ValueError, OIDCError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise HubError(
            f"the token for the Hub cannot be read: {why.lower()}",
            hint="log in again with `hf auth login`, or set `HF_TOKEN`",
        ) from None  # whatever was read is not for a log


def _seconds(text: str) -> float:
    return float(text or 30)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
