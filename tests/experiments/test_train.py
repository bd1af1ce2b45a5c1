"""A run: what it leaves, that it resumes to the same bits, and how it stops."""

import fcntl
from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.train import WeightLawa, ascend, batch_of, train
from qaudit.core.schedules import Constant
from qaudit.errors import MachineError, TrainingError, UsageError
from tests.support.training import DECAY, HELD, SHAPE, equal, read_log, state, weights

EVERYTHING = replace(HELD, ema_decay=0.8, lawa=(2, 5), sam_rho=0.05, accumulation=2, keep_at=(10,))


def test_a_run_leaves_checkpoints_that_transformers_reads_and_replaces_none(tmp_path, text):
    mine, others = tmp_path / "mine", tmp_path / "others"
    train(HELD, text, mine)
    folders = sorted(p.parent.name for p in mine.glob("*/config.json"))
    assert folders == ["stage1-step10", "stage1-step20"]
    assert all(w.dtype is torch.bfloat16 for w in weights(mine / "stage1-step20").values())
    assert not equal(weights(mine / "stage1-step10"), weights(mine / "stage1-step20"))
    (others / "stage1-step20").mkdir(parents=True)
    (others / "stage1-step20" / "thesis.txt").write_text("keep")
    with pytest.raises(UsageError, match=r"stage1-step20` exists, and run `stage1`"):
        train(HELD, text, others)
    assert [p.name for p in others.rglob("*.txt")] == ["thesis.txt"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path, text, device):
    whole, parts, run = tmp_path / "whole", tmp_path / "parts", EVERYTHING
    train(run, text, whole, device=device)

    def stop(step, loss, rate):
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, text, parts, device=device, state_every=5, progress=stop)
    assert state(parts / "states/stage1.pt")["step"] == 5
    train(run, text, parts, device=device)
    names = [p.parent.name for p in whole.glob("*/config.json")]
    assert len(names) == 2 + 2 * len(run.averages)
    for name in names:
        assert equal(weights(whole / name), weights(parts / name)), name
    logs = [[(line["step"], line["loss"]) for line in read_log(out)] for out in (whole, parts)]
    assert [line for line in logs[1] if line[0] != 5] == logs[0]  # no step twice


def test_a_run_is_the_plain_loop_to_the_bit_with_averages_and_in_parts(tmp_path, text):
    # Written out again, as the series that ships with the package was first trained.
    model = SHAPE.build(HELD.seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(1, 21):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, step / 2)
        tokens_BT = batch_of(HELD, text, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for run in (HELD, replace(HELD, ema_decay=0.9, lawa=(2, 10))):
        out = tmp_path / ("averaged" if run.averages else "bare")
        assert equal(state(train(run, text, out))["model"], model.state_dict())
    # Sums of the same terms in another order, in fp32; Adam's first steps divide small numbers.
    run = replace(HELD, steps=3, save_at=(3,), precision="fp32")
    whole = state(train(run, text, tmp_path / "whole"))["model"]
    parts = state(train(replace(run, accumulation=4), text, tmp_path / "parts"))["model"]
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, atol=2e-5, rtol=1e-4)
    a, b = (read_log(tmp_path / name)[0] for name in ("whole", "parts"))
    for what in ("loss", "gradient_norm"):  # to which neither clipping nor Adam is blind
        assert b[what] == pytest.approx(a[what], abs=2e-4)  # logged with four digits
    other = replace(HELD, order=7)  # of the data, from the same weights
    assert not torch.equal(batch_of(HELD, text, 1), batch_of(other, text, 1))
    assert torch.equal(batch_of(replace(HELD, seed=7), text, 1), batch_of(other, text, 1))
    assert equal(SHAPE.build(HELD.seed).state_dict(), SHAPE.build(other.seed).state_dict())


def test_averages_are_those_of_the_weights_along_the_run(tmp_path, text):
    # Every step's fp32 weights are kept, so that both means can be formed again, in float64.
    kept = {"steps": 8, "save_at": (8,), "keep_at": tuple(range(1, 9))}
    run = replace(EVERYTHING, lawa=(3, 2), **kept)
    train(run, text, tmp_path)
    steps = [state(tmp_path / f"states/stage1-step{n}.pt")["model"] for n in range(1, 9)]
    for name in steps[0]:
        lawa = sum(steps[n - 1][name].double() for n in (4, 6, 8)) / 3
        ema = steps[0][name].double()
        for step in steps[1:]:
            ema = 0.8 * ema + 0.2 * step[name].double()
        for average, expected in (("lawa", lawa), ("ema", ema)):
            found = weights(tmp_path / run.label(8, average))[name]
            # bf16 keeps 8 bits: half a unit in the last place is 2**-9 of a number.
            torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    lawa = WeightLawa(3, 2)  # a window that is not full is no average
    for step in range(1, 9):
        lawa.add(step, {"w": torch.tensor([float(step)])})
        mean = lawa.mean(step)
        expected = {6: 4.0, 8: 6.0}.get(step)  # of 2, 4, 6 and of 4, 6, 8
        assert (mean["w"].item() if mean else None) == expected


def test_a_fork_has_own_settings_and_goes_on_as_its_parent(tmp_path, text, monkeypatch):
    parent = replace(HELD, keep_at=(10,))
    held = train(parent, text, tmp_path)
    before, whole = held.read_bytes(), state(held)["model"]
    train(DECAY, text, tmp_path)
    assert held.read_bytes() == before
    other = replace(DECAY, name="stage2-ingredient2", seed=3, weight_decay=0.7, betas=(0.8, 0.9))
    matrices, vectors = state(train(other, text, tmp_path))["optimizer"]["param_groups"]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.7, 0.0)
    assert matrices["betas"] == (0.8, 0.9)
    a, b = (weights(tmp_path / f"stage2-ingredient{k}-step10") for k in (1, 2))
    assert not equal(a, b)
    # The optimizer's moments go with it: with the parent's data and rates it is the parent.
    monkeypatch.setattr(
        "experiments.train.batch_of", lambda run, text, step: batch_of(HELD, text, step + 10)
    )
    schedule = Constant(peak=1e-2)
    fork = replace(DECAY, name="again", schedule=schedule, parent=parent, fork_at=10)
    assert equal(state(train(fork, text, tmp_path))["model"], whole)


def test_a_fork_from_what_is_not_its_parent_or_was_not_kept_is_refused(tmp_path, text):
    train(replace(HELD, keep_at=(5, 12)), text, tmp_path)
    with pytest.raises(UsageError, match="no state of run `stage1` at step 10") as refusal:
        train(replace(DECAY, fork_at=10), text, tmp_path)
    assert "kept are 5, 12" in refusal.value.hint
    other = replace(HELD, weight_decay=0.3)
    with pytest.raises(UsageError, match=r"`weight_decay` was 0.1 and is 0.3"):
        train(replace(DECAY, parent=other), text, tmp_path)
    with pytest.raises(UsageError, match="`tokenizer` is another"):
        train(DECAY, replace(text, tokenizer_key="other"), tmp_path)
    with pytest.raises(UsageError, match="`fork_at` was 20 and is 10"):
        train(replace(DECAY, fork_at=10), text, tmp_path, fork=tmp_path / "states/stage1.pt")


def test_a_run_goes_further_and_is_refused_by_the_name_of_each_other_setting(tmp_path, text):
    train(HELD, text, tmp_path)
    other = replace(HELD, batch=8, clip=0.5, schedule=Constant(peak=2e-2, warmup=2))
    with pytest.raises(UsageError) as refusal:
        train(other, replace(text, key="u" * 64), tmp_path)
    for words in (
        "`batch` was 4 and is 8",
        "`clip` was 1.0 and is 0.5",
        "`schedule.peak` was 0.01 and is 0.02",
        "`text` was tttttttttttt and is uuuuuuuuuuuu",
    ):
        assert words in str(refusal.value)
    assert "warmup" not in str(refusal.value)
    with pytest.raises(UsageError, match=r"is at step 20.*stage1-step15.* of step 15"):
        train(replace(HELD, save_at=(10, 15, 20)), text, tmp_path)  # asked for too late
    longer = replace(HELD, steps=30, save_at=(10, 20, 30))
    path, whole = train(longer, text, tmp_path), train(longer, text, tmp_path / "whole")
    assert equal(state(path)["model"], state(whole)["model"])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Exception, match=r"states/stage1.pt` cannot be read"):
        train(longer, text, tmp_path)


def test_two_processes_that_want_one_run_take_turns(tmp_path, text):
    def others_may_begin():
        with (tmp_path / "states/.stage1.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    while_it_trains = []
    train(HELD, text, tmp_path, progress=lambda *_: while_it_trains.append(others_may_begin()))
    assert while_it_trains == [False, False]
    assert others_may_begin()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, text, monkeypatch):
    def poisoned(run, text, step):
        if step == 15:
            for weight in models[0].parameters():
                weight.data.fill_(float("nan"))
        return batch_of(run, text, step)

    models, build = [], type(SHAPE).build
    monkeypatch.setattr(
        type(SHAPE), "build", lambda self, *a: models.append(build(self, *a)) or models[-1]
    )
    monkeypatch.setattr("experiments.train.batch_of", poisoned)
    with pytest.raises(TrainingError, match="run `stage1`: the loss is nan at step 15"):
        train(HELD, text, tmp_path, state_every=5)
    assert [p.parent.name for p in tmp_path.glob("*/config.json")] == ["stage1-step10"]
    assert all(w.isfinite().all() for w in weights(tmp_path / "stage1-step10").values())
    assert state(tmp_path / "states/stage1.pt")["step"] == 10


def test_a_full_disk_is_named_and_the_last_state_kept(tmp_path, text, monkeypatch):
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    kept = train(HELD, text, tmp_path).read_bytes()
    (tmp_path / "states/stage1.partial").symlink_to("/dev/full")
    longer = replace(HELD, steps=30, save_at=(10, 20, 30))
    with pytest.raises(MachineError, match="no space left on device while writing"):
        train(longer, text, tmp_path)
    assert (tmp_path / "states/stage1.pt").read_bytes() == kept

    def full(self, folder, **more):  # as safetensors says it, on a file system that is full
        folder.mkdir()
        raise SafetensorError("Error while serializing: I/O error: ... (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(MachineError, match="no space left on device while writing"):
        train(HELD, text, tmp_path / "other")
    assert sorted(p.name for p in (tmp_path / "other").iterdir() if p.is_dir()) == ["states"]
    for changed, words in (
        ({"vocabulary": 63}, "has 64 entries"),
        ({"context": 2000}, "the text has 1280 tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            train(replace(HELD, shape=replace(SHAPE, **changed)), text, tmp_path / "third")


def test_the_gradient_is_that_of_the_point_up_the_slope(tmp_path, text):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    inputs, targets = torch.randn(11, 5), torch.randn(11, 3)
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]

    def gradients():
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def plainly(weights):
        """Return the loss and its gradient by autograd on a copy."""
        names = [name for name, _ in model.named_parameters()]
        named = dict(zip(names, weights, strict=True))
        loss = nn.functional.mse_loss(torch.func.functional_call(model, named, (inputs,)), targets)
        return loss.item(), torch.autograd.grad(loss, weights)

    # The paper's two lines: the loss at w, and its gradient at w + rho * g / |g|.
    here = [p.detach().clone().requires_grad_() for p in parameters]
    expected_loss, slopes = plainly(here)
    length = sum(float((g.double() ** 2).sum()) for g in slopes) ** 0.5
    there = [
        (p.double() + 0.07 * g.double() / length).float().requires_grad_()
        for p, g in zip(here, slopes, strict=True)
    ]
    assert float(ascend(parameters, 0.07, gradients)) == pytest.approx(expected_loss, rel=1e-6)
    for p, gradient in zip(parameters, plainly(there)[1], strict=True):
        # The point is formed in fp32 here and in float64 there: a unit in the last place apart.
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(p, was) for p, was in zip(parameters, before, strict=True))
    weight = nn.Parameter(torch.ones(3))

    def flat():
        loss = (weight * 0).sum()
        loss.backward()
        return loss.detach()

    assert float(ascend([weight], 0.07, flat)) == 0
    assert torch.equal(weight.grad, torch.zeros(3))
    run = replace(HELD, steps=3, save_at=(3,), precision="fp32")
    for rho in (0.0, 0.07):
        train(replace(run, sam_rho=rho), text, tmp_path / str(rho))
    a, b = (state(tmp_path / str(rho) / "states/stage1.pt")["model"] for rho in (0.0, 0.07))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) > 3e-3
