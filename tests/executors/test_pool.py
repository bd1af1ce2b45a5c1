"""A pool of processes, what each of them gets of a scan, and devices that compute rightly."""

import math
import random
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cut import alone, checkpoint, cost, outcome, scan, soup
from qaudit.errors import OtherIdentityError
from qaudit.executors import part as ready
from qaudit.executors import queues
from qaudit.executors.folder import cut, in_line
from qaudit.executors.part import refuse_bad_device, wrong_products
from qaudit.executors.queues import gpu_workers
from tests.support.cli import audit_of, refused
from tests.support.parts import demo, same_audit


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_two_workers_give_the_audit_of_one_process(tmp_path, qaudit, monkeypatch):
    monkeypatch.chdir(tmp_path)
    killed = []
    start = queues.Pool._start

    def first_is_killed(self, worker, part, count):  # type: ignore[no-untyped-def]
        process = start(self, worker, part, count)
        if not killed:
            killed.append(part)
            process.kill()
        return process

    monkeypatch.setattr("qaudit.executors.queues.Pool._start", first_is_killed)
    monkeypatch.setattr("qaudit.executors.queues.PARTS_PER_WORKER", 1)
    done = qaudit("scan", *demo(tmp_path), "--out", "out", "--set", "executor=local")
    assert done.code == 0, done.err
    assert f"part {killed[0]}/2 on worker 0 ended with -9" in done.err
    assert qaudit("scan", *demo(tmp_path), "--out", "whole").code == 0
    same_audit(tmp_path / "whole", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_a_worker_that_is_killed_among_candidates_of_a_search_is_replaced_by_the_same_command(
    tmp_path, qaudit, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    asked = (*demo(tmp_path), "--checkpoints", "step10", "--set", "repeats=1")
    asked = (*asked, "--soup", "best=greedy(step10+step200+step1000)")
    started = []
    start = queues.Pool._start

    def first_of_round_2_is_killed(self, worker, part, count):  # type: ignore[no-untyped-def]
        process = start(self, worker, part, count)
        in_round_2 = (tmp_path / "out/parts/round-2.json").exists()
        if in_round_2 and not started:
            process.kill()
        if in_round_2:
            started.append((worker, part))
        return process

    monkeypatch.setattr("qaudit.executors.queues.Pool._start", first_of_round_2_is_killed)
    monkeypatch.setattr("qaudit.executors.queues.TRIES", 1)
    monkeypatch.setattr("qaudit.executors.queues.PARTS_PER_WORKER", 1)
    done = qaudit("scan", *asked, "--out", "out", "--set", "executor=local")
    assert done.code == 3, done.err
    assert "round 2 has 2 subjects, and 1 is not measured yet" in done.err
    assert started == [("worker 0", 0), ("worker 1", 1)]  # a candidate for each of two workers
    done = qaudit("scan", *asked, "--out", "out", "--set", "executor=local")
    assert done.code == 0, done.err
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    same_audit(tmp_path / "whole", tmp_path / "out")
    first, second = (audit_of(tmp_path / name)["diagnostics"] for name in ("whole", "out"))
    assert first["greedy"] == second["greedy"]
    assert len(first["greedy"][0]["candidates"]) == 3


def test_gpus_are_those_of_cuda_or_of_the_driver(monkeypatch):
    for visible, names in (
        ("3,5", ["3", "5"]),
        ("0,0,1", ["0", "1"]),
        (" 2, 1", ["2", "1"]),
        ("1,-1,0", ["1"]),
        ("GPU-7f,", ["GPU-7f"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [w["CUDA_VISIBLE_DEVICES"] for w in gpu_workers("all").values()] == names
        assert [w["CUDA_VISIBLE_DEVICES"] for w in gpu_workers("1").values()] == names[:1]
        with pytest.raises(Exception, match=f"more GPUs than the {len(names)} that are visible"):
            gpu_workers(str(len(names) + 1))
    text = "GPU 0: H100 (UUID: GPU-1)\n  MIG 3g.40gb Device 0: (UUID: MIG-2)\nGPU 1: H100\n"
    answers = iter([subprocess.CompletedProcess((), 0, text)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: next(answers, None) or absent())

    def absent():
        raise FileNotFoundError

    assert [*gpu_workers("all")] == ["GPU 0", "GPU 1"]  # and no slices
    with pytest.raises(Exception, match="more GPUs than the 0 that are visible"):
        gpu_workers("all")


def test_gpus_that_are_no_number_or_of_another_executor_or_device_are_refused(
    tmp_path, qaudit, monkeypatch
):
    absent = ("scan", tmp_path / "absent", "--out", tmp_path / "out")
    for text in ("0", "-1", "", "x", "1.5", "ALL", "9" * 5000, "\u0663"):
        for more in [], ["--dry-run"]:  # before anything is planned
            done = qaudit(*absent, f"--gpus={text}", *more)
            refused(done, 2, "is no number of GPUs", "or `all`")
    done = qaudit("scan", "demo", "--gpus", 1, "--set", "executor=slurm")
    refused(done, 2, "`--gpus` is of the executor `local`", "leave one of them out")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = qaudit("scan", *demo(tmp_path), "--out", tmp_path / "out", "--gpus", 1)
    refused(done, 2, "the plan computes on `cpu`", "--device cuda")


def test_workers_share_memory_for_states(tmp_path, monkeypatch):
    monkeypatch.setattr("qaudit.executors.queues.default_stream_limit", lambda: 1000)
    run = None
    for options, limit in (([], "250B"), (["--set", "stream_memory=7B"], "7B")):
        pool = queues.Pool(run, tmp_path, workers=queues.cpu_workers(4), options=options)
        assert [*pool.options] == ["--set", f"stream_memory={limit}"]


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "node-local"])
def test_a_real_scan_is_cut_within_15_percent_of_the_lower_bound(count, shared):
    units = scan()
    one = outcome(units, count, shared=shared)
    needed = len({c.content for u in units for c in u.checkpoints})
    assert one.makespan <= 1.15, one
    assert needed <= one.fetched < one.in_turn


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    count=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_every_unit_is_in_one_part_and_twins_are_together(sizes, count, seed):
    draw = random.Random(seed)
    series = [checkpoint(n, nbytes) for n, nbytes in enumerate(sizes)]
    units = [alone(one, draw.uniform(1, 9)) for one in series]
    twin = alone(series[draw.randrange(len(series))], 5.0, label="twin")
    members = draw.sample(series, min(3, len(series)))
    units += [twin, soup("soup", members, 3.0)]
    parts = cut(units, count)
    assert sorted(u.label for part in parts for u in part) == sorted(u.label for u in units)
    assert all(parts) and len(parts) <= count
    (with_twin,) = [part for part in parts if twin in part]
    assert [u for u in with_twin if u.subject.content == twin.subject.content and u is not twin]
    line = in_line(units)
    place = {u.label: k for k, u in enumerate(line)}
    assert all(place[c.label] < place["soup"] for c in members)
    assert cut(units, count) == parts
    assert cut(units, 1) == (line,) or {u.label for u in cut(units, 1)[0]} == set(place)
    units = [alone(checkpoint(n, 0), 1.0) for n in range(10)]  # no part is larger than it must be
    assert [len(part) for part in cut(units, 5)] == [2] * 5
    assert math.isclose(max(cost(part) for part in cut(units, 3)), 4.0)
    assert cut([], 4) == ()


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sound_device_gives_every_integer_and_one_wrong_bit_is_enough_to_refuse_another(
    monkeypatch, dtype
):
    monkeypatch.setattr(ready, "SIZE", 128)
    a, b, exact = ready._product(ready.SIZE)
    assert torch.equal(exact.long(), torch.matmul(a, b))  # as integers of 64 bits give it
    assert wrong_products(CPU, dtype) == 0
    refuse_bad_device(CPU, dtype)
    matmul = torch.matmul

    def once_wrong(a, b):
        """Make one product of matrices in this dtype wrong by its last bit."""
        product = matmul(a, b)
        if product.dtype == dtype:
            product[3, 5] = torch.nextafter(product[3, 5], torch.tensor(torch.inf, dtype=dtype))
        return product

    if dtype != torch.float16:  # which has no next number
        monkeypatch.setattr(torch, "matmul", once_wrong)
        assert wrong_products(CPU, dtype) == 1
        said = f"1 of 16384 products in {str(dtype).removeprefix('torch.')} are wrong"
        with pytest.raises(OtherIdentityError, match=said) as bad:
            refuse_bad_device(CPU, dtype)
        assert "on another device" in bad.value.hint
