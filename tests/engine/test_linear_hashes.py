"""The hashes of what schemes make of linears, on the host and on another device."""

from __future__ import annotations

import torch

from qaudit.core.linears import FoldSource, Linears, Quantized
from qaudit.core.registry import parse_scheme
from qaudit.engine.kept_weights import LinearHashes, sha256_of
from tests.support.pretended_device import pretended

RTN, AWQ = parse_scheme("rtn-4bit"), parse_scheme("awq-4bit:exact_fold=true")
WEIGHT_RC = torch.arange(12.0).reshape(3, 4)


def test_each_linear_of_each_block_has_the_hash_of_its_weight() -> None:
    with LinearHashes() as hashes:
        for block in (0, 1):
            linears = Linears({"w": WEIGHT_RC}, block=block)
            hashes.observe(RTN, linears, Quantized({"w": WEIGHT_RC + block}, 0))
    assert hashes.of(RTN.spec) == {
        "0.w": sha256_of(WEIGHT_RC),
        "1.w": sha256_of(WEIGHT_RC + 1),
    }
    assert hashes.of(AWQ.spec) == {}


def test_a_device_has_the_hosts_hashes_and_the_host_does_not_wait_for_it() -> None:
    with pretended() as device, LinearHashes() as hashes:
        hashes.observe(RTN, Linears({}), Quantized({"w": WEIGHT_RC.to("cuda")}, 0))
        main = [line for line in device.waits if "kept_weights" not in line]
    assert main == []
    assert hashes.of(RTN.spec) == {"0.w": sha256_of(WEIGHT_RC)}


def test_scales_of_columns_are_hashed_as_a_file_holds_them() -> None:
    scale_C = torch.tensor([2.0, 0.5, 4.0])
    source = FoldSource("v", is_norm=False, offset=0)
    with LinearHashes() as hashes:
        hashes.observe(AWQ, Linears({}), Quantized({"v": WEIGHT_RC}, 0))
        behind = Linears({}, fold_C=torch.arange(3), fold_source=source)
        out_RC = torch.ones(2, 3)
        hashes.observe(AWQ, behind, Quantized({"o": out_RC}, 0, column_scale_C=scale_C))
    assert hashes.of(AWQ.spec) == {
        "0.v": sha256_of(WEIGHT_RC / scale_C[:, None]),
        "0.o": sha256_of(out_RC * scale_C),
    }
