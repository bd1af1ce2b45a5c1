"""The audit of one block that `doctor` runs on a GPU, and the rates by which plans price one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from qaudit.engine import device_check
from qaudit.engine.device_check import DeviceCheck, check_device
from qaudit.engine.doctor import _one_block
from qaudit.planning import price
from tests.support.pretended_device import pretended

HERE = torch.device("cuda"), torch.bfloat16


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(device_check, "SIDE", 16)
    monkeypatch.setattr(device_check._rate, "__defaults__", (16,))


def test_a_sound_device_has_the_cpus_losses_and_a_rate():
    with pretended() as device:
        checked = check_device(*HERE)
        assert device.tried > 100
    assert checked.apart == dict.fromkeys(("fp", *device_check.SCHEMES), 0.0)
    assert checked.wrong == ()
    assert checked.rate > 0


def test_doctor_says_what_a_7b_would_take():
    checked = DeviceCheck({"fp": 1e-6, "gptq-4bit": 1e-3}, rate=5e14)
    with mock.patch.object(device_check, "check_device", lambda *_: checked):
        fact = _one_block(*HERE)
    assert fact.state == "ok"
    assert fact.value == (
        "the CPU's losses; 500 TFLOP/s in bfloat16: forward passes of a default audit of a 7B "
        "model in 33 s"
    )


@pytest.mark.parametrize(
    ("failure", "value"),
    [
        (
            lambda *_: DeviceCheck({"fp": 1e-3, "gptq-4bit": 1e-3}, 5e14),
            "losses differ from the CPU's: fp by 1.0e-03",
        ),
        (
            mock.Mock(side_effect=RuntimeError("CUDA error:\nno")),
            "does not run there: CUDA error: no",
        ),
    ],
)
def test_doctor_calls_a_device_with_other_losses_a_fault(failure, value):
    with mock.patch.object(device_check, "check_device", failure):
        fact = _one_block(*HERE)
    assert (fact.state, fact.value) == ("fault", value)


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 4.9e14),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 0.8e14),
        ("NVIDIA L4", "float32", 1.5e13),
        ("NVIDIA L40S", "bfloat16", 1.8e14),
        ("a name of tomorrow", "bfloat16", 1e14),
        (None, "float32", 2e13),
    ],
)
def test_a_gpu_is_priced_by_its_name(name, dtype, rate):
    assert price.gpu_rate(name, dtype) == pytest.approx(rate, rel=0.05)
