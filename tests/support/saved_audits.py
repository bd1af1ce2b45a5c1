"""Whole output folders without a scan: drawn measurements, written and judged by the real code."""

import json
from dataclasses import replace
from importlib import resources

from qaudit.judge import judge
from qaudit.judge.table import Measurements
from qaudit.report.folder import render_card as render
from qaudit.report.series import pictures
from qaudit.report.views import View
from qaudit.saved.audits import to_json
from qaudit.saved.results import Identity, ResultStore, sha256_of
from tests.support import sample
from tests.support.items import answered

SCHEMES = ("fp", "gptq-4bit")
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg"><text>{}</text></svg>\n'


def save(folder, *, documents=16, seed=0, subjects=None, text=None, tasks=()):
    """Write the end of the sample's series, its soup, and two columns of evidence."""
    subjects = subjects or sample.series()[-4:]
    labels = {subject.label for subject in subjects}
    every = [m for m in sample.measurements(documents, seed) if m.scheme in SCHEMES]
    found = tuple(answered(m, tasks) for m in every if m.subject in labels)
    folder.mkdir(exist_ok=True)
    store = ResultStore(folder / "evidence")
    files = {}

    def write(m, place, part):
        content = next(one.content for one in subjects if one.label == m.subject)
        identity = identity_of(content, m.spec, str(part))
        path = place.write(m, identity.key, identity).path
        name = path.relative_to(folder).as_posix()
        files[m.subject, m.spec, part] = (name, sha256_of(path))

    for m in found:
        alone = replace(m, evidence=replace(m.evidence, tasks=()))
        write(alone, store, m.calibration_seed)
        for one in m.evidence.tasks:
            own = replace(m, evidence=replace(m.evidence, tasks=(one,)))
            write(own, store.within(f"tasks/{one.task}"), one.task)
    judgement = judge(Measurements.of(subjects, found, 0.95), files)
    audit = replace(sample.put_together(found, subjects, judgement), skipped=(), verdict=None)
    specs = tuple(dict.fromkeys(m.spec for m in found if m.spec != "fp"))
    audit = replace(audit, plan=replace(audit.plan, specs=specs))
    if text is not None:
        recipe = replace(audit.plan.recipe, evaluation=text.source)
        audit = replace(audit, plan=replace(audit.plan, recipe=recipe, texts=(text,)))
    (folder / "audit.json").write_text(to_json(audit), encoding="utf-8")
    (folder / "card.md").write_text(render(audit), encoding="utf-8")
    stub_pictures(audit, folder / "plots")
    return audit


def identity_of(content, spec, part):
    """Return the identity of a measurement that no model gave."""
    return Identity(
        subject=content,
        model="model",
        scheme=spec,
        scheme_version=1,
        corpus=part,
        geometry="context=8",
        dtype="torch.float32",
        device="cpu",
        numerics=2,
        libraries="",
    )


def stub_pictures(audit, folder):
    """Write a small file for every picture: drawing them takes longer than measuring."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in pictures(View(audit))]
    for name in names:
        for kind in ("", "-dark"):
            (folder / f"{name}{kind}.svg").write_text(PICTURE.format(name), encoding="utf-8")
        (folder / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return {name: PICTURE.format(name) for name in names}


SCHEMA = json.loads(resources.files("qaudit.saved").joinpath("audit.schema.json").read_text())


def violations(value):
    """Return how a value departs from the published schema of audit.json."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(SCHEMA)
    return [error.message for error in validator.iter_errors(value)]
