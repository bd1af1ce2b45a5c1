"""What an audit costs, by names and shapes alone: its size, its time, its memory and its disk."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Shipped
from qaudit.diagnostics.diagnostic import parse_diagnostics
from qaudit.errors import MachineError, ModelError
from qaudit.planning import machine as module
from qaudit.planning import price
from qaudit.planning.machine import Footprint
from qaudit.planning.price import begins_again_notes, flops
from qaudit.planning.sizes import ROUND_TOKENS, Load, Sizes, TextSize, with_config
from qaudit.planning.survey import expert_notes
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.types import Protocol
from tests.support.models import save_model, text, write_documents
from tests.support.toys import tokenizer


def shapes(hidden=64, ffn=160, blocks=3, vocabulary=1000, tied=True):
    found = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        found["lm_head.weight"] = (vocabulary, hidden)
    for i in range(blocks):
        found[f"model.layers.{i}.self_attn.q_proj.weight"] = (hidden, hidden)
        found[f"model.layers.{i}.mlp.down_proj.weight"] = (hidden, ffn)
    return found


SMALL = Sizes.of(shapes(), "model")
LARGE = Sizes(7 * 10**9, 32, 2 * 10**8, 6 * 10**8, 4096, 11008, 32000)


def load(schemes=DEFAULT_SCHEMES, documents=8, calibration=None, items=0):
    calibration = documents if calibration is None else calibration
    protocol = Protocol(128, evaluation_documents=documents, calibration_documents=calibration)
    return Load.of(parse_schemes(schemes), replace(TextSize.bound(protocol), item_tokens=items))


def memory(sizes, asked, itemsize, limit):
    return Footprint(sizes, asked, itemsize, limit).memory_nbytes


def test_sizes_are_read_from_shapes_and_more_work_costs_more():
    sizes = Sizes.of(shapes(), "model")
    assert (sizes.blocks, sizes.block_parameters) == (3, 64 * 64 + 64 * 160)
    assert sizes.rest_parameters == 1000 * 64 + 64
    assert sizes.parameters == sizes.rest_parameters + 3 * sizes.block_parameters
    assert (sizes.hidden, sizes.widest, sizes.vocabulary) == (64, 160, 1000)
    assert load().calibrated == 2 + 1  # gptq at 4 and 3 bits; awq on full precision
    assert load(("rtn-4bit",)).calibrated == 0
    assert load(("gptaq-4bit",)).calibrated == 2

    def work(*schemes, documents=8):
        return flops(SMALL, load(schemes, documents))

    assert work("gptq-4bit", documents=16) > work("gptq-4bit")
    assert work(*DEFAULT_SCHEMES) > work("gptq-4bit") > work("rtn-4bit")
    assert work("gptaq-4bit") > work("gptq-4bit")  # a second stream of calibration
    assert work("quarot-rtn-4bit") > work("quarot-rtn-4bit:search=false")
    chosen = work("gptq-mix:budget=4.5") - work("gptq-4bit")  # its bits, once for all budgets
    both = work("gptq-mix:budget=4.5", "gptq-mix:budget=3.5")
    assert both - work("gptq-4bit", "gptq-4bit:group=64") == pytest.approx(chosen)
    assert chosen > 0
    assert work("awq-4bit:modules=true") > 2 * work("awq-4bit")
    steps = [work(f"ostquant-4bit:steps={count}") for count in (1, 2, 51)]
    assert steps[2] - steps[1] == pytest.approx(49 * (steps[1] - steps[0]))


# ---------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("spec", ["rtn-4bit", "gptq-4bit", "gptaq-4bit", "awq-4bit"])
def test_products_are_nearly_all_work_of_a_large_model_and_half_of_a_small_one(spec):
    for sizes, most in ((LARGE, 1.3), (Sizes.of(shapes(64, 160), "model"), 10)):
        asked = load((spec,), documents=64)
        tokens = asked.text.evaluation_tokens  # as many calibrate
        weights = sizes.blocks * sizes.block_parameters
        gram = sizes.blocks * (3 * sizes.hidden**2 + sizes.widest**2)
        products = 2 * asked.streams * tokens * (weights + sizes.vocabulary * sizes.hidden)
        products += asked.calibrated * tokens * (2 * weights + gram)
        assert products < flops(sizes, asked) < most * products


def test_a_time_is_an_order_of_magnitude_on_any_number_of_cores(monkeypatch):
    assert price.matmul_rate() == price.matmul_rate() > 0
    assert price.matmul_rate.cache_info().misses == 1  # measured once a process
    monkeypatch.setattr(price, "matmul_rate", lambda: 1e11)
    for cores in (1, 2, 64, 192):
        monkeypatch.setattr(price.psutil, "cpu_count", lambda cores=cores: cores)
        low, high = price.seconds_range(1e15, "cpu", "float32")
        assert 0 < low < high <= 4 * low
        assert 1e4 / cores <= low <= 1e4
        twice = price.seconds_range(2e15, "cpu", "float32")
        assert twice == pytest.approx((2 * low, 2 * high))
    # Sixteen bits take longer on a processor without instructions for them.
    for dtype, has_units, times in (
        ("bfloat16", True, 1), ("bfloat16", False, 2.5), ("float16", True, 2.5),
    ):  # fmt: skip
        monkeypatch.setattr(price, "has_bf16_units", lambda has_units=has_units: has_units)
        expected = pytest.approx((times * low, times * high))
        assert price.seconds_range(1e15, "cpu", dtype) == expected
    monkeypatch.delattr(price, "matmul_rate")  # a GPU is not priced by the cores beside it
    (low, high), (wide, _) = (
        price.seconds_range(1e15, "cuda", dtype) for dtype in ("bfloat16", "float32")
    )
    assert low < high <= 4 * low
    assert wide > low


# -------------------------------------------------------------------------------------- memory


@given(st.integers(2, 60), st.integers(2, 60), st.integers(1, 10**9))
def test_memory_does_not_grow_with_depth_and_a_limit_on_streams_bounds_it(few, many, limit):
    a, b = (Sizes.of(shapes(blocks=n), "model") for n in (few, many))
    assert memory(a, load(), 4, 10**9) == memory(b, load(), 4, 10**9)
    # three stages, and unspilled runs keep what each of them held
    assert memory(SMALL, load(), 4, limit) <= 3 * memory(SMALL, load(), 4, 0) + limit


def test_a_second_stream_and_gradients_take_memory_and_steps_do_not():
    def takes(spec):
        return memory(SMALL, load((spec,)), 4, 10**9)

    assert takes("gptaq-4bit") > takes("gptq-4bit")
    assert takes("ostquant-4bit:steps=3") == takes("ostquant-4bit") > takes("quarot-4bit")


@settings(max_examples=15)
@given(st.integers(2, 400), st.integers(0, 10**7), st.floats(0.05, 0.99))
def test_what_would_fit_fits_and_a_document_more_does_not(documents, limit, share):
    def takes(calibration, limit):
        return memory(SMALL, load(calibration=calibration), 4, limit)

    footprint = Footprint(SMALL, load(calibration=documents), 4, limit)
    available = int(share * footprint.memory_nbytes)
    lower, fewer = footprint.what_would_fit(available, documents)
    if lower is not None:
        assert 0 < lower <= limit
        assert takes(documents, lower) <= available
    if fewer is not None:
        assert 1 <= fewer < documents
        assert takes(fewer, limit) <= available
        if fewer + 1 < documents:
            assert takes(fewer + 1, limit) > available
    elif lower is None:
        assert takes(1, limit) > available


def test_nothing_is_proposed_where_a_block_is_too_large_and_a_gpu_fits_more():
    footprint = Footprint(SMALL, load(), 4, 10**9)
    assert footprint.what_would_fit(1000, 8) == (None, None)
    with pytest.raises(MachineError) as refusal:
        footprint.refuse_short_memory(1000, 8)
    assert "use a machine with more memory" in refusal.value.hint
    # The memory of a processor does not refuse what a GPU holds.
    footprint = Footprint(SMALL, load(), 4, 0, device="cuda")
    footprint.refuse_short_memory(1000, 8)
    assert not footprint.returning
    assert replace(footprint, device="cpu").returning
    for sizes, gigabytes in (
        (Sizes(7_298_011_136, 32, 202_391_552, 822_087_680, 4096, 11008, 100_352), 8),  # OLMo 2
        (Sizes(32_234_279_936, 64, 487_603_200, 1_027_609_600, 5120, 27648, 100_352), 48),
        (QWEN3_30B_A3B, 24),
    ):
        asked = Load.of(parse_schemes(DEFAULT_SCHEMES), TextSize(64 * 2048, 64 * 2048, 2048))
        assert Footprint(sizes, asked, 2, 0, "cuda").memory_nbytes < gigabytes * 10**9


# --------------------------------------------------------------------------- without any header


QWEN3_30B_A3B = Sizes(
    30_532_122_624, 48, 623_120_640, 622_329_856, 2048, 4096, 151_936,
    expert_parameters=603_979_776, experts=128, per_token=8,
)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_a_configuration_tells_nearly_what_headers_tell(tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=160, num_hidden_layers=3, vocab_size=1000,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    names = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert Sizes.of_config(config.to_dict(), "m") == Sizes.of(names, "m")


def test_a_model_without_blocks_or_a_configuration_that_tells_nothing_is_refused():
    with pytest.raises(ModelError, match="no numbered blocks"):
        Sizes.of({"weight": (3, 3)}, "thing")
    for config in ({}, {"hidden_size": "wide"}, {"hidden_size": -1}):
        with pytest.raises(ModelError, match=r"is not defined by its `config\.json`"):
            Sizes.of_config(config, "m")


def test_tasks_of_a_7b_say_what_their_rounds_take_of_the_disk():
    schemes = parse_schemes(["rtn-4bit", "gptq-4bit", "gptq-3bit"])
    bound = TextSize.bound(Protocol(2048))
    tasks = tuple((f"t{k}", 9) for k in range(30))
    text = replace(bound, item_tokens=21_000_000, items=tasks)
    footprint = Footprint(LARGE, Load.of(schemes, text), 2, 10**9)
    note = footprint.notes[-1]
    assert "about 21 rounds of up to 1.0 M tokens" in note
    assert "quantized weights between rounds 25.6 GB" in note  # two of 12.8 GB: rtn needs none
    assert "hidden states beyond the memory for them 48.5 GB" in note

    def of_items(count, limit):
        load = Load.of(schemes, replace(text, item_tokens=count))
        return replace(footprint, load=load, limit_nbytes=limit)

    assert of_items(900_000, 10**12).notes == ()
    bound = replace(footprint, limit_nbytes=10**15).memory_nbytes
    assert bound == of_items(ROUND_TOKENS, 10**15).memory_nbytes


def mixture(fused):
    found = shapes(blocks=2)
    for i in range(2):
        prefix = f"model.layers.{i}.mlp"
        found[f"{prefix}.gate.weight"] = (8, 64)
        if fused:
            found[f"{prefix}.experts.gate_up_proj"] = (8, 2 * 32, 64)
            found[f"{prefix}.experts.down_proj"] = (8, 64, 32)
        for k in range(0 if fused else 8):
            for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
                found[f"{prefix}.experts.{k}.{name}_proj.weight"] = shape
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    return with_config(Sizes.of(found, "model"), config)


@pytest.mark.parametrize("fused", [False, True])
def test_a_token_is_priced_by_the_experts_that_read_it(fused):
    sizes = mixture(fused)
    assert sizes.expert_parameters == 8 * 3 * 32 * 64
    assert sizes.active_parameters == sizes.block_parameters - 6 * 3 * 32 * 64
    asked = load(("gptq-4bit",))
    routed, everyone = (
        flops(sizes, load((name,))) for name in ("gptq-4bit", "gptq-4bit:all_tokens=true")
    )
    assert routed < everyone < flops(replace(sizes, experts=0), asked)
    calibration = asked.text.calibration_tokens
    assert everyone - routed == pytest.approx(2 * calibration * 2 * 6 * 3 * 32 * 64)


def test_experts_are_quantized_one_after_another_and_priced_by_those_that_read_a_token():
    sizes = mixture(fused=False)
    of_expert = sizes.hidden**2 + 32**2 + 4 * sizes.hidden * 32  # and gate and up once more
    assert price._gram_products(sizes) == 2 * sizes.hidden**2 + 2 * of_expert
    assert price._gram_products(SMALL) == 3 * 64**2 + 160**2
    each = sizes.expert_parameters // 8
    assert sizes.quantized_together == sizes.block_parameters - 7 * each
    assert SMALL.quantized_together == SMALL.block_parameters
    quantizing, of_every_expert = (
        Footprint(size, load(), 2, 0)._stages_nbytes()[0]
        for size in (sizes, replace(sizes, experts=0))
    )
    assert of_every_expert - quantizing == (16 - 2) * 7 * each
    notes = list(expert_notes(sizes))
    assert notes[0].startswith("2 of 8 experts in a layer read a token")
    assert "`mlp.gate`" in notes[1]
    assert list(expert_notes(SMALL)) == []


GB = 10**9
LONG_SCHEMES = ("rtn-4bit", "gptq-4bit", "awq-4bit")


class Planned(Footprint):
    """A pass that takes so much of the disk."""

    rounds, weights_nbytes, spilled_nbytes = 21, 25 * GB, 40 * GB  # type: ignore[assignment]


ITEMS = TextSize(0, 0, 0, items=(("task", 10_042),))
PLANNED = Planned(Sizes(0, 0, 0, 0, 0, 0, 0), Load((), ITEMS, 1), 2, GB)
STREAM_NBYTES = 10 * 10**6


DEMO = Sizes(1_050_000, 4, 197_000, 262_000, 128, 384, 2048)
LONG = Sizes(2_100_000, 2, 737_000, 525_000, 256, 704, 2048)
OF_15M = Sizes(15_200_000, 6, 995_000, 9_216_000, 288, 768, 32_000)
OF_135M = Sizes(8_260_416, 2, 3_540_096, 1_180_224, 576, 1536, 2048)
MIXED = Sizes(24_610_000, 30, 802_816, 524_544, 256, 704, 2048)


def test_memory_is_near_what_was_measured_and_what_is_not_kept_is_said():
    for sizes, schemes, calibration, evaluation, context, measured in (
        # sizes, schemes, tokens to calibrate on and to evaluate, a window: peak in MB above the
        # libraries in float32 (benchmarks/README.md, Memory)
        (DEMO, DEFAULT_SCHEMES, 4_096, 4_096, 512, 262),
        (OF_15M, DEFAULT_SCHEMES, 4_096, 4_096, 512, 680),
        (LONG, LONG_SCHEMES, 32_768, 26_611, 2048, 1_201),
        (OF_135M, ("gptq-4bit",), 32_768, 8_188, 2048, 1_852),
        (MIXED, ("gptq-mix:budget=3.5",), 16_384, 16_352, 512, 974),
    ):
        load = Load.of(parse_schemes(schemes), TextSize(calibration, evaluation, context))
        planned = Footprint(sizes, load, 4, 6 * GB).memory_nbytes / 1e6
        assert measured / 1.2 <= planned <= measured * 1.5
    for rounds, diagnose, reason in (
        (3, "curvature", "the items of tasks go through in about 3 rounds"),
        (1, "weights", "`--set diagnostics=weights` reads what is quantized"),
    ):
        works = [each.work((), 2) for each in parse_diagnostics([diagnose])]
        (note,) = begins_again_notes(rounds, works)
        assert note == f"a subject that is interrupted begins again, because {reason}"
    assert begins_again_notes(1, []) == ()


def test_what_batches_leave_and_what_waits_beside_states_is_planned():
    sizes = LONG

    def of_a_token(sizes, scheme, limit, itemsize=4):
        loads = (Load.of(parse_schemes([scheme]), TextSize(n, 0, 64)) for n in (10_000, 20_000))
        fewer, more = (Footprint(sizes, load, itemsize, limit).memory_nbytes for load in loads)
        return (more - fewer) / itemsize / 10_000

    streams = 2 * sizes.hidden
    waits, made = 5 * sizes.hidden + sizes.widest, 3 * sizes.widest
    assert of_a_token(sizes, "gptq-4bit", 10 * GB) == streams + waits + made
    assert of_a_token(sizes, "rtn-4bit", 10 * GB) == sizes.hidden
    large = replace(sizes, widest=4_096)  # a batch in its widest linear has 64 MiB, then 32
    for itemsize in (4, 2):
        expected = streams + 5 * sizes.hidden + large.widest
        assert of_a_token(large, "gptq-4bit", 10 * GB, itemsize) == expected
    file = Shipped(file="file", format="gptq", bits=4, sha256="0" * 64)
    load = Load.of((*parse_schemes(["gptq-4bit"]), file), TextSize(100, 1_000, 512))
    plain, beside, given = (
        Footprint(replace(DEMO, **more), load, 2, GB).streams_nbytes
        for more in ({}, {"beside": 3}, {"given": 5})
    )
    assert beside - plain == 2 * 3 * ((3 + 1) * 1_000 + (1 + 1) * 100)
    assert given - plain == 2 * 5 * 2 * (1_000 + 100)  # of the subject, and of the file


OUT, TEMPORARY = Path("out"), Path("temporary")
FEWER = "--set task_items=478"


def test_a_disk_too_small_is_refused_with_what_would_fit(monkeypatch):
    monkeypatch.setattr(module, "hub_cache", lambda: Path("cache"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: "temporary")
    short = (
        ({OUT: 25, TEMPORARY: 40}, 100, 21, "", ()),
        ({OUT: 24, TEMPORARY: 40}, 0, 21, "up to 25.0 GB of disk in `out` .* 24.0 GB", (FEWER,)),
        ({OUT: 25, TEMPORARY: 30}, 0, 21, "in `temporary`",
         ("--set stream_memory=11GB` or with", FEWER, "`TMPDIR`")),
        ({OUT: 25, TEMPORARY: 30}, 0, 1, "in `temporary`", ("stream_memory", "`TMPDIR`")),
        ({OUT: 70}, 5, 21, "", ()),  # one disk, which downloads come off
        ({OUT: 70}, 6, 21, "64.0 GB are free", (FEWER,)),
    )  # fmt: skip
    for disks, downloads, rounds, message, ways in short:
        free = {folder: count * GB for folder, count in disks.items()}
        alone = len(disks) == 1
        monkeypatch.setattr(module, "free_disk_nbytes", free.__getitem__)
        monkeypatch.setattr(module, "shares_disk", lambda a, b, alone=alone: a == b or alone)
        monkeypatch.setattr(Planned, "rounds", rounds)
        with pytest.raises(MachineError, match=message) if message else nullcontext() as refused:
            PLANNED.refuse_short_disk(OUT, downloads * GB)
        if refused is not None:
            assert all(way in refused.value.hint for way in ways)
            assert ("task_items" in refused.value.hint) == (FEWER in ways)


_SCAN = """
import json, os, sys, threading, time
from pathlib import Path
from qaudit.engine.hidden_states import HiddenStates
import qaudit.engine.measure as rounds
import qaudit.planning.sizes as cost
import qaudit.planning.machine as footprint
import qaudit.text.texts as texts
from dataclasses import replace
from qaudit.cli import main

cost.ROUND_TOKENS = footprint.ROUND_TOKENS = rounds.ROUND_TOKENS = 6_000
build = texts.item_text

def several_tasks(*arguments):
    text = build(*arguments)
    items = (replace(item, task=f"task-{k // 20}") for k, item in enumerate(text.items))
    return replace(text, items=tuple(items))

texts.item_text = several_tasks
most = 0
files = {}

def look(path, nbytes):
    global most
    files[path] = max(nbytes, files.get(path, 0))
    there = [Path(one) for one in files]
    weights = sum(one.stat().st_size for one in Path().rglob("weights/*/*.safetensors"))
    most = max(most, weights + sum(files[str(one)] for one in there if one.exists()))

spill = HiddenStates._put

def watched(self, stream, batch, hidden_BTD):
    spill(self, stream, batch, hidden_BTD)
    if (stream, batch) in self._files:
        look(str(self._files[stream, batch].path), hidden_BTD.nbytes)

HiddenStates._put = watched
try:
    code = main()
except SystemExit as ended:
    code = ended.code
Path("most.json").write_text(json.dumps([code, most]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "changes", "count"),
    [("llama", {}, 170), ("mistral", {"sliding_window": 64}, 50)],  # with trees and without
)
def test_rounds_take_no_more_memory_and_disk_than_the_plan_says(family, changes, count, tmp_path):
    _prepare(tmp_path, family, **changes)
    many, most = _scanned(tmp_path, count)
    (rounds,) = [note for note in many["plan"]["notes"] if "rounds of" in note]
    assert int(rounds.split("about ")[1].split()[0]) >= 3  # 1 by what trees would feed
    assert many["plan"]["nbytes_disk"] / 4 < most <= many["plan"]["nbytes_disk"]
    if count == 170:
        few, _ = _scanned(tmp_path, 2)
        # Libraries that load while a scan runs take as much as such a model: both have them.
        used = many["environment"]["used"] - few["environment"]["used"]
        every_state = 5 * 170 * 128 * 256 * 4
        assert used <= many["plan"]["nbytes_memory"] < every_state


def _prepare(root, family, **changes):
    shape = {"hidden_size": 256, "max_position_embeddings": 1024}
    save_model(root / "model", 1, family, **shape, **changes)
    tokenizer(adds_bos=False).save_pretrained(root / "model")
    write_documents(root / "calibration.jsonl", range(100, 104))
    write_documents(root / "evaluation.jsonl", range(200, 212))


def _scanned(root, count):
    """Scan so many items in a process; return the audit, and the most bytes on the disk at once."""
    options = {"options": ["a", "key", "path"], "answer": 0}
    lines = [{"context": f"{k} {text(k, 120)}", **options} for k in range(count)]
    (root / "items.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = (
        f"scan model --calibration calibration.jsonl --evaluation evaluation.jsonl --out {count} "
        "--set choices=items.jsonl --schemes rtn-4bit,gptq-4bit,awq-4bit "
        f"--set dtype=float32 -q --set stream_memory={STREAM_NBYTES}B"
    )
    done = subprocess.run(
        [sys.executable, "-c", _SCAN, *arguments.split()],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (root / "most.json").exists(), done.stderr
    code, most = json.loads((root / "most.json").read_text())
    assert code == 0, done.stderr
    audit = json.loads((root / str(count) / "audit.json").read_text())
    environment = audit["environment"]
    used = environment["memory_peak_nbytes"] - environment["memory_baseline_nbytes"]
    environment["used"] = used
    return audit, most
