"""Mixtures of bits through the commands: scan, card, export, verify, and what is killed between."""

import json

import pytest
from compressed_tensors.quantization import QuantizationConfig

from qaudit.core.linears import Linears
from qaudit.core.mixture import bits_in
from qaudit.core.registry import parse_scheme
from qaudit.errors import QauditError
from qaudit.export.folder import try_format
from qaudit.formats.packing import format_named, patterns_of
from qaudit.saved.exports import read_export, write_table
from tests.support.cli import OUT, TEXT, audit_of, refused
from tests.support.formats import weight

MIX = "gptq-mix:budget=3.75:group=32"
SCAN = ("scan", "series/step200", *TEXT, "--schemes", MIX, "--out", "out", "-q")
NAMED = ("--subject", "step200", "--scheme", MIX, "-q", "--out")


def row_of(folder=OUT):
    return next(r for r in audit_of(folder)["measurements"] if r["scheme"] != "fp")


def test_what_a_scan_chose_is_shown_exported_and_verified(qaudit, place):
    qaudit(*SCAN, code=0)
    row, (file,) = row_of(), (place / "out" / "evidence" / "tables").iterdir()
    table = json.loads(file.read_text())
    assert row["mixture"] == table
    assert len(set("".join(table.values()))) > 1
    assert 3.6 < row["bits_per_weight"] <= 3.75
    assert row["bit_class"] == "3"
    assert any(note.startswith("bits differ by linear: of 14, ") for note in row["notes"])
    assert "GPTQ mixture, 3.75 bits, of" in (place / "out" / "report.html").read_text()
    file.unlink()  # an export has the table of the audit
    for form in ("compressed-tensors", "mlx"):
        out = place / form
        assert qaudit("export", "out", *NAMED, out, "--format", form).code == 0
        assert qaudit("verify", out, "--audit", "out", "-q").code == 0
        mixed = read_export(out).mixture
        for name, bits in mixed.items():
            block, _, linear = name.removeprefix("model.layers.").partition(".")
            assert bits == bits_in(table, int(block), linear)
    config = json.loads((place / "mlx" / "config.json").read_text())["quantization"]
    assert {name: config[name]["bits"] for name in mixed} == mixed
    config = json.loads((place / "compressed-tensors" / "config.json").read_text())
    read = QuantizationConfig.model_validate(config["quantization_config"])
    assert {g.weights.num_bits for g in read.config_groups.values()} == set(mixed.values())
    for form, sentence, hint in (
        ("awq", f"`{MIX}` has linears of several widths, and `awq` files have one", "export it"),
        ("gptq", f"`{MIX}` may have linears of 5 or 6 bits, which `gptq` files do not hold",
         f"scan and export `{MIX}:members=348`, or export it"),
    ):  # fmt: skip
        done = qaudit("export", "out", *NAMED, "no", "--format", form)
        refused(done, 2, sentence, f"{hint} as `compressed-tensors` or `mlx`")


@pytest.mark.parametrize(
    ("scheme", "form", "sentence", "hint"),
    [
        ("gptq-mix:budget=7:members=78", "mlx", "linears of 7 bits", "as `compressed-tensors`"),
        ("rtn-mix:budget=4:group=16", "mlx", "has groups of 16", "scan with group=64"),
        ("rtn-mix:budget=4:group=32", "gguf", "linears of 3 or 5 or 6 bits", "or `mlx`"),
        ("gguf-mix:budget=5", "gptq", "does not store integer codes", "export it as `gguf`"),
        ("awq-mix:budget=4", "awq", "`awq-mix:budget=4.0` divides norms", "exact_fold=true"),
        ("base-q-w4a4", "compressed-tensors", "changes what its linears read", "rtn-4bit, gptq"),
        ("gptq-mix:budget=4:sym=false", "compressed-tensors", "zero points", "`--format mlx`"),
        ("rtn-7bit", "mlx", "has 7", "export it as `compressed-tensors`"),
    ],
)
def test_what_no_file_holds_is_refused(scheme, form, sentence, hint):
    parsed = parse_scheme(scheme)
    with pytest.raises(QauditError, match=sentence) as error:
        try_format(parsed, format_named(form, parsed))
    assert hint in error.value.hint
    assert scheme != "rtn-7bit" or "group=64" not in error.value.hint


def test_experts_of_several_widths_are_refused_where_runtimes_take_one():
    form = format_named("compressed-tensors", parse_scheme("gptq-mix:tie=none"))
    form.mixed = {"layers.0.mlp.experts.0.up_proj": 3, "layers.1.mlp.experts.0.up_proj": 4}
    with pytest.raises(QauditError, match="has experts of several widths") as error:
        form.config((), symmetric=True)
    assert "without tie=none" in error.value.hint
    form.mixed = {**form.mixed, "layers.1.mlp.experts.0.up_proj": 3, "layers.1.q_proj": 8}
    assert len(form.config((), symmetric=True)["config_groups"]) == 2


def test_a_scan_that_is_interrupted_goes_on_with_the_table_that_it_kept(qaudit, place, monkeypatch):
    def write(table, path):
        write_table(dict.fromkeys(table, "35"), path)  # which no choice makes
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.engine.mixing.write_table", write)
        assert qaudit(*SCAN).code == 130
    assert qaudit(*SCAN).code == 0
    assert set(row_of()["mixture"].values()) == {"35"}


def test_a_table_of_another_audit_is_pinned_by_its_content(qaudit, place):
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    table = dict.fromkeys((*names, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), "38")
    (place / "table.json").write_text(json.dumps(table))
    scan = ("scan", "series/step10", *TEXT, "--out", "out", "-q", "--schemes")
    assert qaudit(*scan, "gptq-mix:group=32:table=table.json").code == 0
    assert row_of()["mixture"] == table
    for other, sentence, hint in (
        ({**table, "mlp.up_proj": "3"}, "no bits for `mlp.up_proj` of block 1", "`budget=` alone"),
        ({"mlp.up_proj": [3, 3]}, "`table.json` is no table of bits", "a digit for each block"),
    ):
        (place / "table.json").write_text(json.dumps(other))
        done = qaudit(*scan, "gptq-mix:group=32:table=table.json", "--out", "other")
        refused(done, 2, sentence, hint)


def test_files_of_llama_cpp_have_a_type_for_each_linear():
    scheme = parse_scheme("gguf-mix:budget=5")
    weights = {name: weight(k, 32, 256) for k, name in enumerate("ab")}
    quantized = scheme.quantize(Linears(weights, bits={"a": 3, "b": 6}))
    form = format_named("gguf", scheme)
    packed = [n for name, s in quantized.stored.items() for n in form.pack(name, s)]
    assert packed == ["a.Q3_K", "b.Q6_K"]
    assert quantized.bits == 8 * 32 * (110 + 210)  # the bytes of a block of 256
    # Patterns name the linears of each width.
    for mixed, patterns in (
        ({"model.layers.0.a.b": 3, "model.layers.1.a.b": 4, "model.layers.2.a.b": 3},
         {3: [r".*\.(0|2)\.a\.b$"], 4: [r".*\.(1)\.a\.b$"]}),
        ({f"m.layers.{k}.experts.{e}.up": 4 for k in range(2) for e in range(3)},
         {4: [r".*\.(0|1)\.experts\.\d+\.up$"]}),
        ({"m.layers.0.experts.0.up": 4, "m.layers.0.experts.1.up": 3},
         {3: [r".*\.(0)\.experts\.1\.up$"], 4: [r".*\.(0)\.experts\.0\.up$"]}),
    ):  # fmt: skip
        assert patterns_of(mixed) == patterns
