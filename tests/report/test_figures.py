"""Figures: what they show, that nothing leaves them, light and dark, as SVG and as PNG."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from qaudit.errors import MachineError
from qaudit.report.chart import NAMESPACE, PALETTE, drawing, looks, on_page
from qaudit.report.folder import figures, write
from qaudit.report.plots import DRAWERS
from qaudit.report.series import pictures
from qaudit.report.views import View
from qaudit.saved.audits import to_json
from qaudit.types import Subject
from tests.support import sample
from tests.support.filled import filled
from tests.support.verdicts import class_verdict, verdict, with_verdict

PICTURES = ("trajectory", "quantized", "soups", "pareto")
SVG = f"{{{NAMESPACE}}}"


def chart(audit, name):
    with drawing():
        return DRAWERS[name](View(audit))


def renamed(subject, **changes):
    checkpoint = replace(subject.first, **changes)  # type: ignore[arg-type]
    return Subject(checkpoint.label, ((checkpoint, 1.0),))


def bare(labels, **changes):
    """Return an audit of a few checkpoints of which little is known, under one scheme."""
    known = sample.series()[: len(labels)]
    subjects = tuple(
        renamed(s, label=label, stage=None, ingredient=None, tokens=None, learning_rate=None)
        for s, label in zip(known, labels, strict=True)
    )
    subjects = tuple(renamed(s, **changes) for s in subjects)
    names = dict(zip((s.label for s in known), labels, strict=True))
    found = tuple(
        replace(m, subject=names[m.subject])
        for m in sample.measurements(20)
        if m.subject in names and m.scheme in ("fp", "gptq-3bit")
    )
    return sample.assemble(found, subjects)


def damaged(factor):
    """Return an audit in which one scheme multiplies every loss by a factor."""
    found = sample.measurements(20)
    full = {m.subject: m.evidence.nll_sum for m in found if m.scheme == "fp"}
    return sample.assemble(
        tuple(
            sample.with_loss(m, full[m.subject] * factor) if m.scheme == "rtn-4bit" else m
            for m in found
            if m.scheme in ("fp", "rtn-4bit", "gptq-3bit")
        ),
        sample.series(),
    )


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plots")
    write(sample.audit(), folder)
    return folder


@pytest.mark.parametrize("name", PICTURES)
def test_files_are_complete_opaque_described_and_small(drawn, name):
    image = np.asarray(matplotlib.image.imread(drawn / f"{name}.png"), dtype=np.float64)
    assert image.shape[0] > 300
    assert np.all(image[..., 3] == 1.0)
    sides = (image[:6], image[-6:], image[:, :6], image[:, -6:])
    border = np.concatenate([side.reshape(-1, 4) for side in sides])
    assert np.allclose(border[:, :3], 1.0, atol=1.5 / 255)  # nothing touches it
    assert (np.abs(image[..., :3] - 1.0).max(axis=2) > 0.3).mean() > 0.005
    light, dark = (
        (drawn / f"{name}{end}.svg").read_text(encoding="utf-8") for end in ("", "-dark")
    )
    root = ElementTree.fromstring(light)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert {use.get("href") for use in root.iter(f"{SVG}use")} <= {f"#{name}" for name in ids}
    assert not any("style" in element.attrib for element in root.iter())
    assert "http" not in light.replace(NAMESPACE, "")
    for part in ("title", "desc"):
        assert len(root.findtext(f"{SVG}{part}", "")) > 20
    assert any(element.text == "gptq-4bit" or name != "trajectory" for element in root.iter())
    assert len(light) < 70_000
    for one, other in PALETTE.values():
        light = light.replace(one, other)
    assert light == dark


def test_another_process_and_backend_write_the_same_bytes(drawn, tmp_path):
    (tmp_path / "audit.json").write_text(to_json(sample.audit()), encoding="utf-8")
    code = """if True:
        import os, sys
        from pathlib import Path
        from qaudit.report.folder import write
        from qaudit.saved.audits import read_audit
        write(read_audit(Path(sys.argv[1])), Path(sys.argv[1]))
        print(os.environ["MPLBACKEND"])
    """
    backend = "no-such-backend"  # as one of a notebook, which is not installed here
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False,
        env={"PATH": "", "MPLBACKEND": backend, "HOME": str(tmp_path), "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == (backend, 0), done.stderr
    names = {f"{name}{end}" for name in PICTURES for end in (".svg", "-dark.svg", ".png")}
    assert {path.name: path.read_bytes() for path in drawn.iterdir()} == {
        name: (tmp_path / name).read_bytes() for name in names
    }


def test_missing_figures_are_drawn(tmp_path, monkeypatch):
    audit = sample.many(2, 2)
    names = [name for name, _ in pictures(View(audit))]
    for name in names:
        (tmp_path / f"{name}.svg").write_text(f"<svg>{name}</svg>", encoding="utf-8")
    assert figures(audit, tmp_path) == {name: f"<svg>{name}</svg>" for name in names}
    (tmp_path / f"{names[0]}.svg").unlink()
    assert all(len(svg) > 1000 for svg in figures(audit, tmp_path).values())
    monkeypatch.setattr("qaudit.report.folder.find_spec", lambda name: None)
    assert set(figures(audit, tmp_path)) == set(names[1:])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MachineError, match="pictures need matplotlib") as caught:
        write(sample.audit(), tmp_path)
    assert "pip install" in (caught.value.hint or "")


UNUSUAL = {
    "strange names": bare(("$a_b$|<script>`x`\n", "rev-" + "x" * 80)),
    "no steps": bare(("a", "b"), step=None),
    "another script": bare(("\u6aa2\u67e5\u9ede", "\U0001f95a\u0416")),
    "one document": sample.audit(1),  # intervals without bounds
    "no change": damaged(1.0),
    "better": damaged(0.98),  # a loss that falls
    "ruined": damaged(50.0),
    "not finite": damaged(np.nan),
}


@pytest.mark.parametrize("audit", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_audits_are_drawn_without_a_warning(audit):
    for svg in filled(figures(audit).values()):
        assert len(svg) > 1500 and "nan" not in svg


def test_nothing_of_a_saved_file_gets_onto_the_page_but_what_a_figure_needs():
    svg = f"""<svg xmlns="{NAMESPACE}" onload="a()" viewBox="0 0 9 9"><title>t</title>
        <script>b()</script><style>* {{}}</style><foreignObject><p>c</p></foreignObject>
        <a href="https://example.org"><text>d</text></a><image href="https://example.org"/>
        <script xmlns="http://www.w3.org/1999/xhtml">e()</script>
        <use href="https://example.org#x" class="mark" style="fill: red"/>
        <path d="M 0 0" fill="#ffffff" stroke="#004f9e"/></svg>"""
    root = ElementTree.fromstring(on_page(svg, "what it shows"))
    assert [element.tag for element in root.iter()] == ["svg", "use", "path"]
    assert root.attrib == {"viewBox": "0 0 9 9", "aria-label": "what it shows"}
    assert root[0].attrib == {"class": "mark"}
    assert root[1].attrib == {"d": "M 0 0", "fill": "var(--ground)", "stroke": "var(--c0)"}
    assert [on_page(text, "") for text in ("", "<svg>", "<p/>")] == ["", "", ""]


LONG = "a-name-without-end-" * 6 + "{}"


@pytest.mark.parametrize(
    ("subjects", "schemes", "soups", "named"),
    [
        (1, 2, 1, "step{}"),
        (2, 1, 0, LONG),
        (15, 12, 1, "W" * 60 + "{}"),
        pytest.param(200, 8, 30, LONG, marks=pytest.mark.slow),
    ],
)
def test_no_text_leaves_its_figure(subjects, schemes, soups, named):
    audit = sample.many(subjects, schemes, soups=soups, name=named)
    names = [name for name, _ in pictures(View(audit))]
    assert ("soups" in names) == (soups > 0)
    for name in names:
        figure = chart(audit, name).figure
        with drawing():
            FigureCanvasAgg(figure).draw()  # which lays it out
            box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
        width, height = figure.get_size_inches()
        assert 0 < box.x0 < box.x1 < width and 0 < box.y0 < box.y1 < height, name


def test_schemes_differ_without_colour():
    for schemes in (1, 8, 12, 24):
        for names in (View(sample.many(2, schemes)).schemes, [f"rtn-{k}" for k in range(schemes)]):
            own = {(str(look["ls"]), look["marker"]) for look in looks(names).values()}
            assert len(own) == schemes


def test_noise_beneath_the_margins_stays_flat():
    made = [class_verdict(b, margin=m) for b, m in (("8", 0.005), ("4", 0.02), ("3", 0.08))]
    audit = with_verdict(verdict(*made))
    axes = chart(audit, "trajectory").figure.axes[0]
    errors = [e.estimate for s in audit.subjects if (e := View(audit).error(s.label, "bnb-int8"))]
    ends = axes.transData.transform([(0, 100 * min(errors)), (0, 100 * max(errors))])
    assert 0 < ends[1][1] - ends[0][1] < 0.06 * axes.bbox.height
