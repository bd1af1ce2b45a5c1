from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib as mpl
import matplotlib.image
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from qaudit.report import plots
from qaudit.report.plots import style
from qaudit.report.series import axis, inside, phases, pictures, spread_out, trunk
from qaudit.report.views import View
from qaudit.types import Audit, Subject
from tests.support import sample

Array = npt.NDArray[np.float64]
PICTURES = ("trajectory", "quantized", "soups", "pareto")
GROUND = tuple(int(style.GROUND[k : k + 2], 16) / 255 for k in (1, 3, 5))


def pixels(path: Path) -> Array:
    return np.asarray(matplotlib.image.imread(path), dtype=np.float64)


def renamed(subject: Subject, **changes: object) -> Subject:
    checkpoint = replace(subject.first, **changes)  # type: ignore[arg-type]
    return Subject(checkpoint.label, ((checkpoint, 1.0),))


def bare(labels: tuple[str, ...], **changes: object) -> Audit:
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


def damaged(factor: float) -> Audit:
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
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots")
    plots.draw(sample.audit(), folder)
    return folder


def test_every_picture_is_there_as_svg_and_png(drawn: Path) -> None:
    names = {f"{name}.{kind}" for name in PICTURES for kind in ("svg", "png")}
    assert {path.name for path in drawn.iterdir()} == names


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_clipped_and_the_ground_is_opaque(drawn: Path, name: str) -> None:
    image = pixels(drawn / f"{name}.png")
    assert image.shape[0] > 500
    assert np.all(image[..., 3] == 1.0)
    sides = (image[:6], image[-6:], image[:, :6], image[:, -6:])
    border = np.concatenate([side.reshape(-1, 4) for side in sides])
    assert np.allclose(border[:, :3], GROUND, atol=1 / 255)
    inked = np.abs(image[..., :3] - GROUND).max(axis=2) > 0.3
    assert inked.mean() > 0.005


@pytest.mark.parametrize("page", [0.0, 1.0])
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_look_the_same_on_a_dark_and_a_light_page(
    drawn: Path, name: str, page: float
) -> None:
    image = pixels(drawn / f"{name}.png")
    seen = image[..., :3] * image[..., 3:] + page * (1 - image[..., 3:])
    assert np.array_equal(seen, image[..., :3])


@pytest.mark.parametrize("name", PICTURES)
def test_svgs_are_xml_without_a_date(drawn: Path, name: str) -> None:
    text = (drawn / f"{name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "dc:date" not in text


def test_the_same_audit_gives_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    plots.draw(sample.audit(), tmp_path)
    for path in drawn.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_every_scheme_is_named_once_at_the_end_of_its_line() -> None:
    figure = plots.trajectory(View(sample.audit()))
    texts = [text.get_text() for text in figure.axes[0].texts]
    for scheme in sample.SCHEMES:
        assert texts.count(scheme) == 1
    assert {"stage1", "stage2", "soup"} <= set(texts)


def test_names_at_the_ends_do_not_overlap() -> None:
    figure = plots.trajectory(View(sample.audit()))
    figure.canvas.draw()
    boxes = [
        Text.get_window_extent(text)  # of the words, without the line that leads to them
        for text in figure.axes[0].texts
        if text.get_text() in sample.SCHEMES
    ]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_the_line_is_the_relative_error_in_percent() -> None:
    view = View(sample.audit())
    axes = plots.trajectory(view).axes[0]
    expected = [
        100 * score.relative_error.estimate
        for subject in trunk(view)
        for score in [view.score(subject.label, "gptq-3bit")]
        if score and score.relative_error
    ]
    drawn = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
    assert any(len(y) == len(expected) and np.allclose(y, expected) for y in drawn)
    tokens = [float(s.first.tokens or 0) for s in trunk(view)]
    assert any(
        len(line.get_xdata()) == len(tokens) and np.allclose(line.get_xdata(), tokens)
        for line in axes.get_lines()
    )


def test_the_learning_rate_stands_beneath_only_where_it_is_known() -> None:
    assert len(plots.trajectory(View(sample.audit())).axes) == 2
    assert len(plots.trajectory(View(bare(("a", "b", "c")))).axes) == 1


@pytest.mark.parametrize(
    "audit",
    [
        bare(("$a_b$|<script>`x`\n", "rev-" + "x" * 80)),
        bare(("a", "b"), step=None),
        sample.audit(1),  # intervals without bounds
        damaged(1.0),  # no change at all
        damaged(0.98),  # a loss that falls
        damaged(50.0),
        damaged(np.nan),
    ],
    ids=[
        "strange names",
        "no steps",
        "one document",
        "no change",
        "better",
        "ruined",
        "not finite",
    ],
)
def test_unusual_audits_are_drawn_without_a_warning(audit: Audit, tmp_path: Path) -> None:
    for path in plots.draw(audit, tmp_path):
        assert path.stat().st_size > 5000


def test_a_single_checkpoint_has_no_pictures(tmp_path: Path) -> None:
    audit = bare(("alone",))
    assert pictures(View(audit)) == []
    assert plots.draw(audit, tmp_path) == ()


LONG = "a-name-without-end-" * 6 + "{}"


@pytest.mark.parametrize(
    ("subjects", "schemes", "soups", "named"),
    [
        (1, 2, 1, "step{}"),
        (2, 1, 0, LONG),
        (15, 12, 1, "W" * 60 + "{}"),
        (200, 8, 30, LONG),
    ],
)
def test_every_text_lies_inside_its_picture(
    subjects: int, schemes: int, soups: int, named: str
) -> None:
    view = View(sample.many(subjects, schemes, soups=soups, name=named))
    drawn = [name for name, _ in pictures(view)]
    assert ("soups" in drawn) == (soups > 0)
    with mpl.rc_context(style.settings()):
        for name in drawn:
            figure = plots.DRAWERS[name](view)
            figure.canvas.draw()
            texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text()]
            boxes = [(t.get_text(), Text.get_window_extent(t)) for t in texts if seen(t, figure)]
            assert len(boxes) > 3
            width, height = figure.canvas.get_width_height()
            outside = [
                (text, box.extents)
                for text, box in boxes
                if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
            ]
            assert outside == [], name


def seen(text: Text, figure: Figure) -> bool:
    """Say whether a text is drawn: labels of ticks beyond an axis's limits are not."""
    for axes in figure.axes:
        for side, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in (*side.get_major_ticks(), *side.get_minor_ticks()):
                if text in (tick.label1, tick.label2):
                    return min(low, high) <= tick.get_loc() <= max(low, high)
    return True


def test_a_name_in_another_script_is_drawn_without_a_warning(tmp_path: Path) -> None:
    plots.draw(bare(("\u6aa2\u67e5\u9ede", "\U0001f95a\u0416")), tmp_path)
    assert (tmp_path / "trajectory.svg").stat().st_size > 5000


# ------------------------------------------------------------------ soups


def test_every_difference_to_an_ingredient_is_drawn_where_it_lies() -> None:
    view = View(sample.audit())
    left, right = plots.soups(view).axes
    for axes, kind in ((left, "outright"), (right, "difference_of_differences")):
        expected = sorted(
            c.interval.estimate
            for c in view.audit.comparisons
            if c.a == "soup" and c.kind == kind and c.scheme != "fp" and "ingredient" in c.b
        )
        points = [line for line in axes.lines if line.get_marker() in ("o", "s", "D")]
        assert sorted(float(line.get_xdata()[0]) for line in points) == pytest.approx(expected)
        assert any(list(line.get_xdata()) == [0, 0] for line in axes.lines)


def test_what_cannot_be_told_is_hollow() -> None:
    view = View(sample.audit())
    verdicts = [
        c.verdict
        for c in view.audit.comparisons
        if c.a == "soup" and c.kind == "difference_of_differences" and "ingredient" in c.b
    ]
    right = plots.soups(view).axes[1]
    hollow = [line for line in right.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == verdicts.count("inconclusive")
    assert hollow


def test_of_many_ingredients_the_best_one_is_drawn() -> None:
    audit = sample.audit()
    more = tuple(
        replace(c, b=f"another{k}") for c in audit.comparisons if c.a == "soup" for k in range(5)
    )
    view = View(replace(audit, comparisons=(*audit.comparisons, *more)))
    points = [x for x in plots.soups(view).axes[0].lines if x.get_marker() in ("o", "s", "D")]
    assert len(points) == len(view.schemes)


# ------------------------------------------------------------------ colours


@pytest.mark.parametrize("schemes", [1, 8, 12, 24])
def test_schemes_are_told_apart_without_colour(schemes: int) -> None:
    names = View(sample.many(2, schemes)).schemes
    looks = style.styles(names)
    assert len({(line, marker) for _, line, marker in looks.values()}) == schemes
    one_method = tuple(f"rtn-{k}" for k in range(schemes))
    assert len({look[1:] for look in style.styles(one_method).values()}) == schemes


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


@pytest.mark.parametrize("vision", list(VISION))
def test_colours_stay_apart_for_every_common_vision(vision: str) -> None:
    seen = [
        lightness_and_hue(np.reshape(VISION[vision], (3, 3)) @ linear(c))
        for c in style.METHOD_COLOURS
    ]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 15


@pytest.mark.parametrize("colour", [*style.METHOD_COLOURS, style.INK, style.FAINT])
def test_colours_stand_out_from_the_ground(colour: str) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    contrast = (linear(style.GROUND) @ weights + 0.05) / (linear(colour) @ weights + 0.05)
    assert contrast > 3.5  # 3 is asked of graphics, 4.5 of small text


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


def test_the_front_holds_every_scheme_once_and_joins_what_nothing_cheaper_beats() -> None:
    view = View(sample.audit())
    axes = plots.pareto(view).axes[0]
    said = [text.get_text().partition(":")[0] for text in axes.texts if ":" in text.get_text()]
    assert sorted(said) == sorted([*view.schemes, "fp", "filled"])
    front = axes.lines[0].get_ydata()
    assert all(a > b for a, b in pairwise(front))


def test_a_scale_that_is_straight_near_zero_shows_where() -> None:
    found = sample.measurements(20)
    full = {m.subject: m.evidence.nll_sum for m in found if m.scheme == "fp"}
    gains = (
        sample.with_loss(m, full[m.subject] * 0.9999) if m.scheme == "bnb-int8" else m
        for m in found
    )
    audit = sample.assemble(tuple(gains), sample.series())
    axes = plots.trajectory(View(audit)).axes[0]
    assert axes.get_yscale() == "symlog"
    straight = axes.yaxis.get_transform().linthresh  # type: ignore[attr-defined]
    ticks = [tick for tick in axes.get_yticks() if tick >= 0]
    assert ticks[:3] == [0.0, straight / 2, straight]
    assert all(a < b <= 2.5 * a for a, b in pairwise(ticks[2:]))
    assert f"{ticks[3] / 10 ** np.floor(np.log10(ticks[3])):.0f}" in ("1", "2", "5")


def test_heights_are_moved_back_inside() -> None:
    assert inside({"a": 0.95, "b": 1.05}, 0.02) == pytest.approx({"a": 0.88, "b": 0.98})
    assert inside({"a": -0.1, "b": 0.5}, 0.02) == pytest.approx({"a": 0.02, "b": 0.62})
    assert inside({"a": 0.4}, 0.02) == {"a": 0.4}
    assert inside({}, 0.02) == {}


def test_the_learning_rate_is_read_in_phases() -> None:
    view = View(sample.audit())
    found = phases(view, axis(view))
    assert [phase.name for phase in found] == ["held", "falls"]
    assert found[0].end == found[1].begin == 5000 * 8192
    assert phases(View(bare(("a", "b", "c"))), axis(View(bare(("a", "b", "c"))))) == ()
    texts = [text.get_text() for text in plots.trajectory(view).axes[1].texts]
    assert texts == ["held", "falls"]
