"""Plug-ins of other distributions: a small package, built, installed, used and judged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qaudit.core.linears import Linears
from qaudit.core.registry import origins, parse_scheme, schemes
from qaudit.core.scheme import Shipped
from qaudit.diagnostics import diagnostic as diagnostics
from qaudit.errors import ConfigurationError, MachineError
from qaudit.formats.packing import format_named
from qaudit.formats.weights import QuantizedFolder, format_of
from qaudit.support.plugins import entries_of
from tests.support.cli import OUT, audit_of, cells, refused

PACKAGE = Path(__file__).parents[1] / "support" / "plugin"
ORIGIN = {"distribution": "qaudit-ternary", "version": "0.1.0"}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build the package and install it into a folder, without a network."""
    target = tmp_path_factory.mktemp("site")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--target")
    command = [sys.executable, "-m", "pip", "install", "-q", *options, target, PACKAGE]
    subprocess.run(command, check=True, capture_output=True)
    return target


def forget():
    for one in (entries_of, diagnostics.names, diagnostics.broken, diagnostics.diagnostics):
        one.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "qaudit_ternary"]:
        del sys.modules[name]


@pytest.fixture
def clean():
    forget()
    yield
    forget()


@pytest.fixture
def installed(built, clean, monkeypatch):
    monkeypatch.syspath_prepend(built)
    return built


def distribution(folder, entries):
    info = folder / "other_one-2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-one\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(entries)


def test_a_plug_in_is_measured_and_judged_without_it(installed, scan, place, qaudit, monkeypatch):
    for kind, name in (("schemes", "ternary"), ("merges", "middle"), ("diagnostics", "zeros")):
        assert name in qaudit("list", kind, "-q").out.split()
    soup = "soup=middle(step10+step200+step1000)"
    more = ("--schemes", "ternary", "--soup", soup, "--set", "diagnostics=zeros", "--set", "last=1")
    scan("series", *more, code=0)
    audit = audit_of()
    assert audit["plan"]["plugins"] == [
        {"kind": "scheme", "name": "ternary", **ORIGIN},
        {"kind": "merge", "name": "middle", **ORIGIN},
        {"kind": "diagnostic", "name": "zeros", **ORIGIN},
    ]
    assert "the scheme `ternary` is of qaudit-ternary 0.1.0" in audit["plan"]["notes"]
    rows = cells()
    soup_row = rows["soup", "ternary"]
    assert (soup_row["bit_class"], soup_row["calibrates"]) == ("2", False)
    for row, names in ((soup_row, ["qaudit-ternary 0.1.0"]), (rows["step1000", "fp"], [])):
        assert json.loads(str(np.load(OUT / row["evidence"])["about"]))["plugins"] == names
    zeros = audit["diagnostics"]["others"]["zeros"]
    assert {row["subject"] for row in zeros} == {"step1000", "soup"}

    rule = "{name: new, metric: relative_error, subjects: '@all', schemes: SCHEMES, margin: 900%}"
    (place / "policy.yaml").write_text(f"rules: [{rule}]\n".replace("SCHEMES", "ternary"))
    (place / "any.yaml").write_text(f"rules: [{rule}]\n".replace("SCHEMES", '"*"'))
    forget()
    qaudit("gate", "out", "--policy", "policy.yaml", "--format", "json", code=0)
    anywhere = qaudit("gate", "out", "--policy", "any.yaml", "--format", "json", code=0)
    assert "qaudit_ternary" not in sys.modules
    sys.path.remove(str(installed))
    forget()
    assert qaudit("gate", "out", "--policy", "any.yaml", "--format", "json").out == anywhere.out


def test_files_in_a_format_of_others_name_their_reader(installed, tmp_path):
    scheme = parse_scheme("ternary")
    weight_RC = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    quantized = scheme.quantize(Linears({"a": weight_RC}))
    form = format_named("ternary", scheme)
    packed = form.pack("a", quantized.stored["a"])
    assert set(packed) == {"a.weight_packed", "a.weight_scale", "a.weight_shape"}
    config = {**form.config((), symmetric=True), "quant_method": "ternary"}
    save_file(packed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert torch.equal(QuantizedFolder(tmp_path).read("a.weight"), quantized.weights["a"])
    assert format_of(tmp_path) == ("ternary", 2, 16)
    shipped = Shipped(file="f", format="ternary", bits=2, sha256="0")
    assert [str(plugin) for plugin in origins([shipped])] == ["qaudit-ternary 0.1.0"]
    sys.path.remove(str(installed))
    forget()
    with pytest.raises(ConfigurationError, match="the format `ternary`"):
        QuantizedFolder(tmp_path)


def test_what_is_no_reader_is_refused_where_a_file_needs_it(clean, tmp_path, monkeypatch):
    distribution(tmp_path / "site", "[qaudit.readers]\nodd = math:pi\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    no_reader = "`math:pi` of other-one 2.5 is no Reader named `odd`"
    for method, error, sentence, hint in (
        ("odd", MachineError, no_reader, "uninstall"),
        ("absent", ConfigurationError, "the format `absent` of", "odd"),
    ):
        table = {"quantization_config": {"quant_method": method, "bits": 4}}
        (tmp_path / "config.json").write_text(json.dumps(table))
        with pytest.raises(error, match=sentence) as refusal:
            format_of(tmp_path)
        assert hint in str(refusal.value.hint)


def test_two_schemes_of_one_name_are_refused(installed, tmp_path, monkeypatch, qaudit):
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name, other in (("ternary", "qaudit-ternary 0.1.0"), ("rtn", "qaudit-llm ")):
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        distribution(tmp_path / "site", f"[qaudit.schemes]\n{name} = other:One\n")
        forget()
        done = qaudit("list", "schemes")
        refused(done, 2, f"two distributions have a scheme `{name}`", "pip uninstall")
        assert other in done.err and "other-one 2.5" in done.err


def test_a_broken_plug_in_is_refused_where_it_is_used(clean, tmp_path, monkeypatch, qaudit, scan):
    monkeypatch.syspath_prepend(tmp_path / "site")
    for value, sentence in (
        ("absent_module:One", "the scheme `broken` of other-one 2.5 cannot be imported: No module"),
        ("math:pi", "`math:pi` of other-one 2.5 is no Scheme named `broken`"),
        ("leaving:One", "of other-one 2.5 cannot be imported: it ends the process with exit code"),
    ):
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        entries = f"[qaudit.schemes]\nbroken = {value}\n[qaudit.diagnostics]\nworse = {value}\n"
        distribution(tmp_path / "site", entries)
        (tmp_path / "site" / "leaving.py").write_text("raise SystemExit(0)")
        forget()
        refused(scan("series/step10", "--schemes", "broken"), 4, sentence, "uninstall other-one")
        worse = scan("series/step10", "--set", "diagnostics=worse")
        refused(worse, 4, "the diagnostic `worse` of other-one 2.5 cannot", "uninstall other-one")
        scan("series/step10", "--dry-run", code=0)
        listed = qaudit("list", "schemes", code=0)
        assert ("gptq" in listed.out, sentence in listed.out) == (True, True)
        assert "worse" in qaudit("list", "diagnostics").out


def test_a_plug_in_that_ends_the_process_is_an_error(installed, scan, monkeypatch):
    monkeypatch.setattr(schemes()["ternary"], "quantize", lambda *_: sys.exit(0))
    done = scan("series/step10", "--schemes", "ternary")
    refused(done, 4, "ended the process with exit code 0", "measured results are kept")
