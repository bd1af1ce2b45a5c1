"""A scan measures how far each scheme's predictions are from full precision."""

from __future__ import annotations

from pathlib import Path

from tests.support.cli import Run, audit_of


def test_every_scheme_has_its_divergence_also_where_full_precision_was_measured_before(
    place: Path, scan: Run
) -> None:
    assert scan("series/step10").code == 0
    assert scan("series/step10", "--schemes", "rtn-2bit").code == 0  # beside rtn-4bit
    full, four, two = audit_of(place / "out")["measurements"]
    assert (full["scheme"], four["scheme"], two["scheme"]) == ("fp", "rtn-4bit", "rtn-2bit")
    assert full["kl"] is None
    assert 0 < four["kl_low"] <= four["kl"] <= four["kl_high"]
    assert four["kl"] < two["kl"] <= two["kl_max"]
    assert two["kl_p50"] <= two["kl_p90"] <= two["kl_p99"] <= two["kl_max"] * 1.1
    assert 0 < two["top1_agreement"] <= 1
    assert 0 < two["rms_dp"] < 1
