"""Saved audits as JSON: their schema, what others build on; and readers that end in words."""

import copy
import json
import math
import os
import shutil
from contextlib import suppress
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qaudit
from experiments.table import ExperimentSummary
from qaudit.errors import AuditError, QauditError
from qaudit.hub import answers
from qaudit.hub.answers import GarbledError
from qaudit.judge import judge
from qaudit.judge.table import Measurements
from qaudit.planning.pin import read_lock
from qaudit.saved.audits import (
    DOCUMENTS,
    from_json,
    path_of,
    plan_to_json,
    read_audit,
    text_of_schema,
    to_json,
)
from qaudit.saved.codec import decode, text_of
from qaudit.saved.evidence import read_saved
from qaudit.saved.results import ResultStore, read_measurement, sha256_of
from qaudit.text.documents import read_choices
from qaudit.text.tokenizer import Cutter, load_tokenizer
from qaudit.types import Document, Finding, Interval, Protocol, TextFile, Traffic
from tests.support import sample
from tests.support.items import answered
from tests.support.models import save_tokenizer
from tests.support.saved_audits import SCHEMA, identity_of, save, violations


def document(audit=None):
    return json.loads(to_json(audit or sample.audit()))


def test_names_that_others_build_on_are_all_there():
    tasks = sample.judged(tuple(map(answered, sample.measurements()))).tasks
    rows = document(replace(sample.audit(), tasks=tasks))["tasks"]
    names = """subject scheme task items accuracy accuracy_low accuracy_high drop drop_low drop_high
        flips right_to_wrong wrong_to_right p_value margin_factor"""
    columns = set(names.split())
    assert {row["task"] for row in rows} == {"a", "b", "mean"}
    assert all(columns <= row.keys() for row in rows)
    place = ["soup", "rtn-4bit", "a"]
    (one,) = (r for r in rows if [r[name] for name in ("subject", "scheme", "task")] == place)
    assert all(one[name] is not None for name in columns)
    assert (one["items"], one["right_to_wrong"], one["wrong_to_right"]) == (400, 30, 0)
    assert one["drop_low"] < one["drop"] == one["flips"] == 0.075 < one["drop_high"]
    noise = document(sample.repeated())["diagnostics"]["noise"]
    assert {frozenset(row) for row in noise} == {frozenset(SCHEMA["$defs"]["Noise"]["properties"])}
    written = document()
    for table, names in (
        (written, """schema qaudit plan environment subjects measurements comparisons diagnostics
            findings pick skipped"""),
        (written["measurements"][0], """subject scheme spec ce ce_low ce_high relative_error
            relative_error_low relative_error_high perplexity bits_per_byte documents tokens
            bits_per_weight seconds notes evidence evidence_sha256 calibration_seed"""),
        (written["subjects"][0], """label kind revision commit stage step tokens_seen learning_rate
            members merge"""),
        (written["pick"], "subject scheme objective runner_up low high"),
    ):  # fmt: skip
        assert set(names.split()) <= set(table)
    full = next(m for m in written["measurements"] if m["scheme"] == "fp")
    assert full["relative_error"] is full["relative_error_low"] is None
    soup = next(s for s in written["subjects"] if s["kind"] == "soup")
    members = [f"stage2-ingredient{k}-step1000" for k in (1, 2, 3)]
    assert [m["label"] for m in soup["members"]] == members
    assert sum(m["weight"] for m in soup["members"]) == pytest.approx(1)
    assert soup["revision"] is None


def test_a_loss_that_is_not_finite_is_written_as_null_and_comes_back():
    found = sample.measurements()
    bad = next(m for m in found if m.scheme == "rtn-3bit")
    nll = np.where(np.arange(len(bad.evidence.nll_sum)) == 3, np.nan, bad.evidence.nll_sum)
    broken = tuple(sample.with_loss(m, nll) if m is bad else m for m in found)
    audit = sample.assemble(broken, sample.series())
    audit = replace(audit, environment={**audit.environment, "load": math.nan})
    text = to_json(audit)
    assert "NaN" not in text
    assert "Infinity" not in text
    again = from_json(text)
    assert again.measurements == audit.measurements
    assert again.findings == audit.findings
    assert again.environment["load"] is None
    assert violations(json.loads(text)) == []
    rows = {"high": math.inf, "rows": [math.nan, 1.5]}
    assert json.loads(text_of(rows)) == {"high": None, "rows": [None, 1.5]}


def of_the_hub():
    audit = sample.audit()
    *others, (last, weight) = audit.subjects[-1].members
    odd = replace(last, suspect=("its files are those of `main`",), requires=("pickle",))
    soup = replace(audit.subjects[-1], members=(*others, (odd, weight)))
    subjects = (*audit.subjects[:-1], soup)
    text = TextFile("hf://datasets/a/b/c.txt", "a/b", 40 * "c", "c.txt", 7, "git:" + 40 * "d")
    findings = (
        Finding("QA009", "warn", "soup", None, "twice the same", "leave one out"),
        Finding("QA010", "info", "soup", None, "odd", "", Interval(1.0, 0.5, math.inf), 2.0),
    )
    plan = replace(
        audit.plan, subjects=subjects, texts=(text,), traffic=Traffic(350, 10, 61, 100, None),
        findings=findings, detectable_relative_error=0.0012,
    )  # fmt: skip
    return replace(audit, plan=plan, subjects=subjects)


EMPTY = dict.fromkeys(("measurements", "comparisons", "findings", "tasks"), ())


def test_audits_come_back_and_keep_schemas_that_are_what_types_say():
    alone = json.loads(plan_to_json(sample.audit().plan))
    inside = document()["plan"]
    del inside["protocol"]
    assert alone == inside
    schema = json.loads(path_of("plan").read_text(encoding="utf-8"))
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(alone)) == []
    for name in DOCUMENTS:
        written = path_of(name).read_text(encoding="utf-8")
        assert written == text_of_schema(name), "run `python -m qaudit.saved.audits`"
        jsonschema.Draft202012Validator.check_schema(json.loads(written))
    files = {path.name for path in path_of("plan").parent.glob("*.schema.json")}
    assert files == {path_of(name).name for name in DOCUMENTS}
    for audit in (
        sample.audit(),
        sample.repeated(),
        of_the_hub(),
        sample.audit(1),  # whose intervals have no bound
        replace(sample.audit(), pick=None, **EMPTY),
    ):
        assert from_json(to_json(audit)) == audit
        assert violations(document(audit)) == []
    # The schema refuses what no audit has.
    broken = document(of_the_hub())
    del broken["measurements"][3]["ce_low"]
    broken["comparisons"][0]["verdict"] = "splendid"
    broken["plan"]["checkpoints"][-1]["requires"] = ["everything"]
    del broken["plan"]["traffic"]["nbytes_disk_peak"]
    assert len(violations(broken)) == 4


def test_later_names_are_ignored_and_edits_and_later_schemas_refused():
    newer = document()
    newer["measurements"][0]["sharpness"] = 3
    newer["weather"] = "fine"
    assert from_json(json.dumps(newer)) == sample.audit()
    with pytest.raises(AuditError, match="schema version 7") as refusal:
        from_json(json.dumps(newer | {"schema": "7", "qaudit": "4.2.0"}))
    assert "4.2.0" in refusal.value.hint
    text = to_json(sample.audit(4))
    for path, value in (
        (("measurements", 0, "ce"), "low"),
        (("measurements", 0, "documents"), True),
        (("measurements", 0, "subject"), "a stranger"),
        (("measurements", 0), 3),
        (("measurements",), None),
        (("subjects", 0, "members", 0, "checkpoint"), 99),
        (("subjects", 0, "members"), []),
        (("comparisons", 0, "verdict"), "splendid"),
        (("plan", "checkpoints", 0, "files"), {}),
        (("plan", "recipe", "targets"), "demo"),
        (("pick", "subject"), None),
    ):
        edited = json.loads(text)
        inner = edited
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        with pytest.raises(AuditError, match="`"):
            from_json(json.dumps(edited))
    whole = json.loads(text)
    for name in SCHEMA["required"]:
        with pytest.raises(AuditError):
            from_json(json.dumps({key: whole[key] for key in whole if key != name}))


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """Return an audit as another installation writes it, under a scheme of its own."""
    out = tmp_path_factory.mktemp("unknown")
    save(out / "plain")
    saved = read_saved(out / "plain")
    contents = {subject.label: subject.content for subject in saved.audit.subjects}
    files, measurements = {}, []
    for m in saved.measurements:
        if m.scheme == "gptq-4bit":
            m = replace(m, scheme="newq", spec="newq:turns=3", bit_class="w4a4", calibrates=True)
        identity = identity_of(contents[m.subject], m.spec, "0")
        path = ResultStore(out / "evidence").write(m, identity.key, identity).path
        files[m.subject, m.spec, 0] = (f"evidence/{path.name}", sha256_of(path))
        measurements.append(m)
    judgement = judge(Measurements.of(saved.audit.subjects, measurements, 0.95), files)
    plan = replace(saved.audit.plan, specs=("newq:turns=3",))
    written = replace(saved.audit, plan=plan, **judgement.fields)
    (out / "audit.json").write_text(to_json(written), encoding="utf-8")
    return out


def test_an_audit_is_judged_alike_where_its_scheme_is_not_installed_and_edits_are_refused(
    unknown, tmp_path
):
    policy = tmp_path / "policy.yaml"
    rule = "{name: new, metric: relative_error, subjects: '@ships', bits: w4a4, margin: 9%}"
    policy.write_text(f"rules: [{rule}]\n")
    gate = qaudit.gate(unknown, policy=str(policy))
    assert gate.exit_code == 0
    assert [(c.bit_class, c.scheme) for c in gate.classes] == [("w4a4", "newq")]
    out = shutil.copytree(unknown, tmp_path / "out")
    for column, value in (("bit_class", "4"), ("calibrates", False)):
        table = json.loads((unknown / "audit.json").read_text(encoding="utf-8"))
        row = next(m for m in table["measurements"] if m["scheme"] == "newq")
        row[column] = value
        (out / "audit.json").write_text(json.dumps(table), encoding="utf-8")
        with pytest.raises(AuditError, match=f"`{column}` of .* disagrees with its evidence"):
            qaudit.gate(out, policy="release")


WHOLE = to_json(sample.repeated())
ODD = (
    None, True, 0, -1, 1e308, 10**400, 2**63, "", "\ud800", "\x00", [], {}, [[]], {"a": []},
)  # fmt: skip


def places(value, path=()):
    found = [path]
    if isinstance(value, dict):
        found += [p for key, inner in value.items() for p in places(inner, (*path, key))]
    if isinstance(value, list) and value:
        found += places(value[0], (*path, 0))
    return found


PLACES = places(json.loads(WHOLE))


def changed(path, value):
    document = {"": json.loads(WHOLE)}
    inner = document
    *places, last = ("", *path)
    for key in places:
        inner = inner[key]
    inner[last] = value
    return json.dumps(document[""])


@given(st.sampled_from(PLACES), st.sampled_from(ODD))
def test_an_audit_with_any_value_anywhere_is_read_or_refused(path, value):
    try:
        audit = from_json(changed(path, value))
    except AuditError as error:
        assert error.message
        assert error.hint
    else:
        assert from_json(to_json(audit)) == audit


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, "1" * 10**5, "-" * 10**6, '"\\ud800"', "1e999", "NaN"]
)
def test_text_that_stops_parsers_is_refused(text):
    for whole in (text, f'{{"schema": "1", "qaudit": "", "plan": {text}}}'):
        with pytest.raises(AuditError):
            from_json(whole)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return a name for files that are written again and again."""
    return tmp_path_factory.mktemp("readers") / "file"


@given(st.binary(max_size=300), st.dictionaries(st.text(max_size=9), st.text(max_size=5)))
def test_any_bytes_are_refused_by_every_reader_of_files_and_any_table_is_no_experiment(
    file, content, table
):
    file.write_bytes(content)
    for read, error in (
        (read_audit, QauditError), (read_lock, QauditError), (read_measurement, ValueError)
    ):  # fmt: skip
        with pytest.raises(error):
            read(file)
    with pytest.raises(AuditError):
        decode(ExperimentSummary, table, "summary")


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "audit.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        path = tmp_path
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(AuditError):
        read_audit(path)
    with pytest.raises(QauditError):
        read_lock(path)


# ------------------------------------------------- choices, answers of the Hub and tokenizers


_KEYS = st.sampled_from([
    "question", "choices", "options", "answer", "context", "label", "text", "path", "oid", "size",
    "lfs", "type", "branches", "tags", "name", "targetCommit", "ref", "sha", "siblings", "id",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=12,
)
PARSERS = [answers.revisions_in, answers.files_in, answers.shapes_in]


@given(rows=st.lists(JSON, max_size=4))
def test_any_choices_are_read_or_refused(file, rows):
    path = file.with_suffix(".jsonl")
    text = "\n".join(json.dumps(row) for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(QauditError):
        read_choices(str(path))


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(answer=JSON | st.lists(st.lists(JSON, min_size=3, max_size=4), max_size=3))
def test_any_answer_of_the_hub_is_parsed_or_garbled(parse, answer):
    with suppress(GarbledError):
        parse(answer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return {file.name: json.loads(file.read_text("utf-8")) for file in folder.glob("token*.json")}


@given(data=st.data())
def test_tokenizers_are_loaded_or_refused(file, whole, data):
    files = copy.deepcopy(whole)
    holder = files[data.draw(st.sampled_from(sorted(files)))]
    while True:
        key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else [0]))
        if not (isinstance(holder[key], dict | list) and holder[key]) or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(JSON)
    for name, contents in files.items():
        text = json.dumps(contents)
        (file.parent / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(QauditError):
        tokenizer = load_tokenizer(file.parent)
        Cutter(tokenizer, Protocol(context=8)).encode(Document("d", "a b c"))
