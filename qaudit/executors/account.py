"""What a process used and ran on, as audits and records of parts keep it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from qaudit.engine.machine import environment, peak_nbytes, resident_nbytes
from qaudit.hub import Hub
from qaudit.version import __version__


@dataclass(frozen=True)
class Account:
    """Begun when everything is loaded, and before the first weights are read."""

    device: torch.device
    hub: Hub | None
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    baseline_nbytes: int = field(default_factory=resident_nbytes)

    def environment(self, seconds_waited: float) -> dict[str, Any]:
        """Return the machine, its libraries, and what was used so far."""
        return {
            **environment(self.device),
            "qaudit": __version__,
            "began": self.began.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "memory_baseline_nbytes": self.baseline_nbytes,
            "memory_peak_nbytes": peak_nbytes(self.device),
            **self._hub_use(seconds_waited),
        }

    def _hub_use(self, seconds_waited: float) -> dict[str, Any]:
        if self.hub is None:
            return {}
        return {
            "hub_calls": self.hub.client.calls,
            "hub_requests": self.hub.client.requests,
            "hub_nbytes_fetched": self.hub.fetcher.nbytes_fetched,
            "hub_nbytes_verified": self.hub.fetcher.nbytes_verified,
            "hub_seconds_waited": round(seconds_waited, 3),
        }
