"""Figures: what they show, that nothing leaves them, light and dark, as SVG and as PNG."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise, starmap
from pathlib import Path

import matplotlib.image
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.text import Text

from qaudit.errors import MachineError
from qaudit.report.figures import Drawing, figures, style, write
from qaudit.report.figures.drawing import Label, Leaf, Mark, leaves
from qaudit.report.figures.drawing import Path as Line
from qaudit.report.figures.frame import NAME_HEIGHT, at_ends, spread_out
from qaudit.report.figures.png import canvas
from qaudit.report.series import axis, phases, trunk
from qaudit.report.views import View
from qaudit.types import AuditRecord, Interval, Subject
from tests.support import sample
from tests.support.filled import filled
from tests.support.items import answered

Array = npt.NDArray[np.float64]
PICTURES = ("trajectory", "quantized", "soups", "pareto")
SVG = "{http://www.w3.org/2000/svg}"


def figure(audit: AuditRecord, name: str) -> Drawing:
    return next(drawing for drawing in figures(audit) if drawing.name == name)


def parts(drawing: Drawing, kind: type[Leaf], *names: str) -> list[Leaf]:
    """Return the parts of a type whose kind has all the names."""
    return [
        p
        for p in leaves(drawing.parts)
        if isinstance(p, kind) and set(names) <= set(p.kind.split())
    ]


def texts(drawing: Drawing) -> list[str]:
    return [part.text for part in leaves(drawing.parts) if isinstance(part, Label)]


def test_the_picture_of_accuracy_says_what_its_bands_hold() -> None:
    tasks = sample.judged(tuple(map(answered, sample.measurements()))).tasks
    key = figure(replace(sample.audit(), tasks=tasks), "accuracy").note
    assert key.split(";")[0] == "Bands: 95 % intervals over items"


def renamed(subject: Subject, **changes: object) -> Subject:
    checkpoint = replace(subject.first, **changes)  # type: ignore[arg-type]
    return Subject(checkpoint.label, ((checkpoint, 1.0),))


def bare(labels: tuple[str, ...], **changes: object) -> AuditRecord:
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


def damaged(factor: float) -> AuditRecord:
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


# ------------------------------------------------------------------ files


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots")
    write(sample.audit(), folder)
    return folder


def test_every_figure_is_written_as_svg_light_and_dark_and_as_png(drawn: Path) -> None:
    ends = (".svg", "-dark.svg", ".png")
    assert {path.name for path in drawn.iterdir()} == {f"{n}{e}" for n in PICTURES for e in ends}


@pytest.mark.parametrize("name", PICTURES)
def test_a_png_is_opaque_and_nothing_touches_its_border(drawn: Path, name: str) -> None:
    image = np.asarray(matplotlib.image.imread(drawn / f"{name}.png"), dtype=np.float64)
    ground = [int(style.LIGHT["ground"][k : k + 2], 16) / 255 for k in (1, 3, 5)]
    assert image.shape[0] > 500
    assert np.all(image[..., 3] == 1.0)
    sides = (image[:6], image[-6:], image[:, :6], image[:, -6:])
    border = np.concatenate([side.reshape(-1, 4) for side in sides])
    assert np.allclose(border[:, :3], ground, atol=1.5 / 255)
    assert (np.abs(image[..., :3] - ground).max(axis=2) > 0.3).mean() > 0.005


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("dark", [False, True])
def test_an_svg_is_complete_by_itself_and_has_its_theme(drawn: Path, name: str, dark: bool) -> None:
    text = (drawn / f"{name}{'-dark' * dark}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    own, other = (style.DARK, style.LIGHT) if dark else (style.LIGHT, style.DARK)
    assert own["ground"] in text
    assert other["ground"] not in text
    shapes = {f"#{shape.get('id')}" for shape in root.iter(f"{SVG}path") if shape.get("id")}
    assert {use.get("href") for use in root.iter(f"{SVG}use")} <= shapes
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert root.find(f"{SVG}title") is not None


def test_light_and_dark_differ_in_their_colours_alone(drawn: Path) -> None:
    light, dark = (
        [e.attrib for e in ElementTree.parse(drawn / f"trajectory{end}.svg").iter()]
        for end in ("", "-dark")
    )
    assert light == dark


def test_the_same_audit_gives_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    write(sample.audit(), tmp_path)
    for path in filled(drawn.iterdir()):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "audit",
    [
        bare(("$a_b$|<script>`x`\n", "rev-" + "x" * 80)),
        bare(("a", "b"), step=None),
        bare(("\u6aa2\u67e5\u9ede", "\U0001f95a\u0416")),
        sample.audit(1),  # intervals without bounds
        damaged(1.0),  # no change at all
        damaged(0.98),  # a loss that falls
        damaged(50.0),
        damaged(np.nan),
    ],
    ids=[
        "strange names",
        "no steps",
        "another script",
        "one document",
        "no change",
        "better",
        "ruined",
        "not finite",
    ],
)
def test_unusual_audits_are_drawn_without_a_warning(audit: AuditRecord, tmp_path: Path) -> None:
    for path in filled(write(audit, tmp_path)):
        assert path.stat().st_size > 1500
        assert path.suffix == ".png" or "nan" not in path.read_text(encoding="utf-8")


def test_a_single_checkpoint_has_no_figures(tmp_path: Path) -> None:
    assert write(bare(("alone",)), tmp_path) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["no-such-backend", "module://matplotlib_inline.backend_inline"]
)
def test_pictures_have_their_own_backend(backend: str, tmp_path: Path) -> None:
    code = """if True:
        from qaudit.report.figures.drawing import Drawing
        from qaudit.report.figures.png import png
        import os
        assert png(Drawing("a", "b", "c", (), 20.0)).startswith(b"\\x89PNG")
        print(os.environ["MPLBACKEND"])
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PATH": "", "MPLBACKEND": backend, "HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == (backend, 0), done.stderr


def test_without_matplotlib_a_sentence_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MachineError, match="PNG pictures need matplotlib") as caught:
        write(sample.audit(), tmp_path)
    assert "pip install" in (caught.value.hint or "")
    assert (tmp_path / "trajectory.svg").exists()  # which need no library


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
def test_every_text_is_inside_its_figure(
    subjects: int, schemes: int, soups: int, named: str
) -> None:
    drawings = figures(sample.many(subjects, schemes, soups=soups, name=named))
    assert ("soups" in [drawing.name for drawing in drawings]) == (soups > 0)
    for drawing in drawings:
        whole = canvas(drawing)
        whole.canvas.draw()
        width, height = whole.canvas.get_width_height()
        shown = [text for text in whole.findobj(Text) if text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
        assert len(boxes) > 3
        assert [
            (text, box.extents)
            for text, box in boxes
            if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
        ] == [], drawing.name


# ------------------------------------------------------------------ what is shown


def test_every_scheme_is_named_once_at_the_end_of_its_line() -> None:
    shown = texts(figure(sample.audit(), "trajectory"))
    assert all(shown.count(scheme) == 1 for scheme in sample.SCHEMES)
    assert {"stage1", "stage2", "soup", "held", "falls", "learning rate"} <= set(shown)


def test_names_at_the_ends_do_not_overlap() -> None:
    labels = parts(figure(sample.many(4, 24), "trajectory"), Label, "strong")
    heights = sorted(label.y for label in labels if isinstance(label, Label))
    assert len(heights) == 24
    assert all(b - a >= NAME_HEIGHT - 1e-6 for a, b in pairwise(heights))


def test_the_line_is_the_relative_error_along_the_main_line() -> None:
    view = View(sample.audit())
    drawing = figure(sample.audit(), "trajectory")
    errors = [
        100 * score.relative_error.estimate
        for subject in trunk(view)
        for score in [view.score(subject.label, "gptq-3bit")]
        if score and score.relative_error
    ]
    tokens = [float(s.first.tokens or 0) for s in trunk(view)]
    look = style.looks(view.schemes)["gptq-3bit"]
    line, *siblings = parts(drawing, Line, *look.stroke.split(), *([] if look.line else ["line"]))
    assert isinstance(line, Line)
    assert np.corrcoef([x for x, _ in line.points], tokens)[0, 1] == pytest.approx(1)
    order = np.argsort([-y for _, y in line.points])
    assert list(order) == list(np.argsort(errors))
    # Ingredients beside the main line are lines of their own, from the state they decay from.
    fork = line.points[tokens.index(max(t for t in tokens if t in stage_tokens(view)))]
    assert [path.points[0] for path in siblings if isinstance(path, Line)] == [fork, fork]


def test_runs_side_by_side_are_lines_of_their_own() -> None:
    plain = sample.many(6, 2)

    def anew(k: int, subject: Subject) -> Subject:
        first, step = subject.first, k % 3
        stage = ("half", "tenth")[k // 3]
        again = replace(
            first, step=step, tokens=8192 * step, stage=stage, ingredient=None, family=None
        )
        return replace(subject, members=((again, 1.0),))

    audit = replace(plain, subjects=tuple(starmap(anew, enumerate(plain.subjects))))
    view = View(audit)
    drawing = figure(audit, "trajectory")
    lines = [path.points for path in parts(drawing, Line, "line") if isinstance(path, Line)]
    assert len(lines) >= 2 * len(view.schemes)
    assert {len(points) for points in lines} == {3}
    assert all(a[0] < b[0] for points in lines for a, b in pairwise(points))
    assert not {"half", "tenth"} & set(texts(drawing))
    assert "a line for each run" in drawing.note
    assert all(phase.begin < phase.end for phase in phases(view, axis(view)))


def stage_tokens(view: View) -> set[float]:
    return {float(s.first.tokens or 0) for s in view.checkpoints if s.first.stage == "stage1"}


def test_the_learning_rate_is_beneath_only_where_it_is_known() -> None:
    assert "learning rate" in texts(figure(sample.audit(), "trajectory"))
    assert "learning rate" not in texts(figure(bare(("a", "b", "c")), "trajectory"))


def test_an_axis_that_is_linear_near_zero_says_up_to_where() -> None:
    found = sample.measurements(20)
    full = {m.subject: m.evidence.nll_sum for m in found if m.scheme == "fp"}
    gains = (
        sample.with_loss(m, full[m.subject] * 0.9999) if m.scheme == "bnb-int8" else m
        for m in found
    )
    shown = texts(figure(sample.assemble(tuple(gains), sample.series()), "trajectory"))
    (unit,) = [text for text in shown if text.startswith("added loss, %")]
    straight = float(unit.partition("linear up to ")[2].partition(" %")[0])
    ticks = {float(text) for text in shown if text.replace(".", "").isdigit()}
    assert {0.0, straight / 2, straight} <= ticks


def test_every_difference_to_an_ingredient_is_drawn_and_zero_is_marked() -> None:
    audit = sample.audit()
    drawing = figure(audit, "soups")
    compared = [
        c
        for c in audit.comparisons
        if c.a == "soup"
        and c.kind in ("outright", "difference_of_differences")
        and c.scheme != "fp"
        and "ingredient" in c.b
    ]
    assert len(parts(drawing, Mark)) == len(compared)
    hollow = parts(drawing, Mark, "hollow")
    assert len(hollow) == sum(c.verdict == "inconclusive" for c in compared) > 0
    assert len(parts(drawing, Line, "zero")) == 2


def test_of_many_ingredients_the_best_one_is_drawn() -> None:
    audit = sample.audit()
    more = tuple(
        replace(c, b=f"another{k}") for c in audit.comparisons if c.a == "soup" for k in range(5)
    )
    audit = replace(audit, comparisons=(*audit.comparisons, *more))
    assert len(parts(figure(audit, "soups"), Mark)) == 2 * len(View(audit).schemes)


def test_the_front_holds_every_scheme_once_and_falls() -> None:
    drawing = figure(sample.audit(), "pareto")
    names = [*View(sample.audit()).schemes, "fp"]
    assert sorted(text for text in texts(drawing) if text in names) == sorted(names)
    assert "The best subject is soup everywhere." in drawing.note
    (front,) = parts(drawing, Line, "front")
    assert isinstance(front, Line)
    assert all(a <= b for (_, a), (_, b) in pairwise(front.points))  # lower on the page


def test_no_name_covers_the_line_of_the_front() -> None:
    drawing = figure(sample.audit(), "pareto")
    (front,) = parts(drawing, Line, "front")
    assert isinstance(front, Line)
    for label in leaves(drawing.parts):
        if not isinstance(label, Label) or label.text not in (*View(sample.audit()).schemes, "fp"):
            continue
        for (x1, y1), (x2, y2) in pairwise(front.points):
            beside = x2 < label.x or x1 > label.x + 7 * len(label.text)
            assert beside or not label.y - 9 < y1 < label.y + 3 or y1 != y2, label


def test_a_scale_says_where_it_turns_linear() -> None:
    drawing = figure(sample.audit(), "trajectory")
    assert not any("linear below" in text for text in texts(drawing))  # all errors are positive
    scores = tuple(
        replace(s, relative_error=Interval(-0.0001, -0.0002, 0.0))
        if (s.subject, s.scheme) == ("stage1-step500", "bnb-int8")
        else s
        for s in sample.audit().measurements
    )
    drawn = texts(figure(replace(sample.audit(), measurements=scores), "trajectory"))
    (turn,) = (text for text in drawn if text.startswith("linear below "))
    unit = f"linear up to {turn.removeprefix('linear below ')}, logarithmic beyond"
    assert any(unit in text for text in drawn)


# ------------------------------------------------------------------ colours


@pytest.mark.parametrize("schemes", [1, 8, 12, 24])
def test_schemes_differ_without_colour(schemes: int) -> None:
    names = View(sample.many(2, schemes)).schemes
    own = {(look.line, look.marker) for look in style.looks(names).values()}
    assert len(own) == schemes
    one_method = style.looks([f"rtn-{k}" for k in range(schemes)])
    assert len({(look.line, look.marker) for look in one_method.values()}) == schemes


def linear(colour: str) -> Array:
    value = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lightness_and_hue(rgb: Array) -> Array:
    """Return CIELAB, in which distances are roughly those people see."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


VISION = {  # Machado, Oliveira and Fernandes 2009, full severity
    "common": (1, 0, 0, 0, 1, 0, 0, 0, 1),
    "protanopia": (
        *(0.152286, 1.052583, -0.204868),
        *(0.114503, 0.786281, 0.099216),
        *(-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        *(0.367322, 0.860646, -0.227968),
        *(0.280085, 0.672501, 0.047413),
        *(-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        *(1.255528, -0.076749, -0.178779),
        *(-0.078411, 0.930809, 0.147602),
        *(0.004733, 0.691367, 0.303900),
    ),
}


@pytest.mark.parametrize("palette", [style.LIGHT, style.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("vision", list(VISION))
def test_colours_stay_apart_for_every_common_vision(vision: str, palette: style.Palette) -> None:
    seen = [
        lightness_and_hue(np.reshape(VISION[vision], (3, 3)) @ linear(palette[c]))
        for c in style.METHODS
    ]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 15


@pytest.mark.parametrize("palette", [style.LIGHT, style.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("colour", [*style.METHODS, "ink", "faint"])
def test_colours_stand_out_from_the_ground(colour: str, palette: style.Palette) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(linear(palette[c]) @ weights + 0.05 for c in ("ground", colour))
    assert high / low > 3.5  # 3 is asked of graphics, 4.5 of small text


# ------------------------------------------------------------------ positions


def steps(*found: tuple[str | None, int]) -> View:
    subjects = tuple(
        renamed(sample.series()[0], label=f"{stage}-{step}", stage=stage, step=step, tokens=None)
        for stage, step in found
    )
    scores = tuple(replace(sample.audit().measurements[0], subject=s.label) for s in subjects)
    return View(replace(sample.audit(), subjects=subjects, measurements=scores))


def test_checkpoints_stand_at_their_tokens() -> None:
    found = axis(View(sample.audit()))
    assert found.name == "tokens"
    assert found.positions["stage1-step5000"] == 5000 * 8192


def test_without_tokens_checkpoints_stand_at_their_steps() -> None:
    found = axis(steps((None, 10), (None, 400)))
    assert (found.name, list(found.positions.values())) == ("steps", [10.0, 400.0])


def test_a_stage_that_counts_from_zero_again_follows_the_one_before() -> None:
    found = axis(steps(("a", 10), ("a", 400), ("b", 50), ("b", 100)))
    assert list(found.positions.values()) == [10.0, 400.0, 450.0, 500.0]
    going_on = axis(steps(("a", 10), ("a", 400), ("b", 450)))
    assert list(going_on.positions.values()) == [10.0, 400.0, 450.0]


def test_without_steps_checkpoints_stand_in_order() -> None:
    found = axis(View(bare(("a", "b", "c"), step=None)))
    assert list(found.positions.values()) == [1.0, 2.0, 3.0]


def test_of_parallel_ingredients_the_longest_is_the_main_line() -> None:
    labels = [s.label for s in trunk(View(sample.audit()))]
    assert "stage2-ingredient1-step1000" in labels
    assert not any("ingredient2" in label or "ingredient3" in label for label in labels)


def test_heights_are_spread_out_in_order() -> None:
    placed = spread_out({"a": 0.5, "b": 0.5, "c": 0.51, "far": 0.9}, gap=0.05)
    values = [placed[name] for name in ("a", "b", "c", "far")]
    assert all(second - first > 0.05 - 1e-9 for first, second in pairwise(values))
    assert placed["far"] == 0.9
    assert np.mean(values[:3]) == pytest.approx(np.mean([0.5, 0.5, 0.51]))


def test_names_are_kept_inside_a_panel_and_above_a_line() -> None:
    assert at_ends({"a": 95.0, "b": 105.0}, 0, 100) == pytest.approx({"a": 76, "b": 92})
    assert at_ends({"a": -10.0, "b": 60.0}, 0, 100) == pytest.approx({"a": 8, "b": 78})
    assert at_ends({"a": 50.0}, 0, 100, 40.0) == {"a": 40.0}
    assert at_ends({"a": 10.0}, 0, 100, 2.0) == {"a": 8.0}
    assert at_ends({}, 0, 100) == {}


def test_the_learning_rate_is_read_in_phases() -> None:
    view = View(sample.audit())
    found = phases(view, axis(view))
    assert [phase.name for phase in found] == ["held", "falls"]
    assert found[0].end == found[1].begin == 5000 * 8192
    assert phases(View(bare(("a", "b", "c"))), axis(View(bare(("a", "b", "c"))))) == ()
