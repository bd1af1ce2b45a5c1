"""The page in a real browser: Chromium without a window, driven by selenium, from a file.

One page of the sample, with marks, diagnostics and a folded series, is read by one browser. Every
test opens it anew, in the light, wide, unless it says otherwise.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import pypdfium2
import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from qaudit.report.folder import figures
from qaudit.report.folder import render_page as render
from qaudit.report.format import printable
from tests.support import sample
from tests.support.browser import browser, needs_browser
from tests.support.cards import check, held
from tests.support.diagnosed import HELD, LAST, ROLES, SERIES, WEIGHT, grid_of, parts_of, slice_of
from tests.support.diagnosed import audit_with as curved
from tests.support.hostile import HARSH, named
from tests.support.items import answered
from tests.support.verdicts import class_verdict, verdict, with_verdict

pytestmark = [pytest.mark.browser, needs_browser]
WCAG = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}


def shown():
    """Return a series long enough to be folded, with marks, a soup and diagnostics."""
    audit = held(
        check("fail"),
        check("inconclusive", scheme="awq-4bit"),
        check("pass", subject="stage1-step500"),
    )
    sharp = curved([*SERIES, *ROLES], [*slice_of(HELD), *grid_of(LAST)])
    more = sample.many(5, 8).subjects
    scores = tuple(s for s in sample.many(5, 8).measurements if s.scheme != "bnb-int8")
    return replace(
        audit,
        subjects=(*audit.subjects[:-1], *more, audit.subjects[-1]),
        measurements=(*audit.measurements, *scores),
        diagnostics=replace(sharp.diagnostics, weights=(WEIGHT,), sensitivity=parts_of(LAST)),
    )


def undecided():
    """Return an audit with the longest words for what does not ship."""
    nothing = {"subject": None, "scheme": None, "relative_error": None}
    return with_verdict(
        verdict(
            class_verdict("8"),
            class_verdict("4", "undecided", level="warn"),
            class_verdict("3", "incomplete", **nothing),
        )
    )


def with_tasks():
    """Return an audit of three draws with the longest names of the twelve tasks."""
    tasks = ("arc_challenge", "commonsense_qa")
    found = tuple(answered(m, tasks) for m in sample.measurements())
    return replace(sample.repeated(), tasks=sample.judged(found).tasks)


@dataclass(frozen=True, eq=False)
class Desk:
    """A browser, and where the pages lie."""

    driver: webdriver.Chrome
    folder: Path

    def open(self, name="report", *, width=1200, scheme="light"):
        """Open a page anew, and unfold its sections."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.media(scheme)
        self.driver.get((self.folder / f"{name}.html").as_uri())
        self.run("document.querySelectorAll('section > details').forEach((e) => e.open = true)")

    def media(self, scheme, kind=""):
        """Show the page as on a screen or on paper, in the light or in the dark."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        media = {"media": kind, "features": features}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def unfold(self):
        """Open everything that is folded."""
        self.run("document.querySelectorAll('details').forEach((e) => (e.open = true))")

    def run(self, script, *arguments):
        """Run a script on the page."""
        return self.driver.execute_script(script, *arguments)

    def one(self, selector):
        """Return an element."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        """Return what stands in elements, seen or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.run(script, selector))

    def complaints(self):
        """Return what the console has said since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Return what was asked for since the last time, by the names of pages."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        stopped = {
            message["params"]["requestId"]
            for message in messages
            if message["method"] == "Network.loadingFailed"
            if message["params"].get("blockedReason") == "csp"  # it never left the browser
        }
        return [
            message["params"]["request"]["url"].removeprefix(f"{self.folder.as_uri()}/")
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
            if message["params"]["requestId"] not in stopped
            if not message["params"]["documentURL"].startswith("chrome")  # its own first page
        ]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Start one browser for all tests, with pages beside it."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {"harsh": named(HARSH), "tasks": with_tasks(), "undecided": undecided()}
    for name, audit in pages.items():
        (folder / f"{name}.html").write_text(render(audit), encoding="utf-8")
    page = render(shown(), figures(shown()))
    (folder / "report.html").write_text(page, encoding="utf-8")
    with browser(folder / "profile") as driver:
        yield Desk(driver, folder)


@pytest.fixture
def page(desk):
    """Open the page anew."""
    desk.complaints()
    desk.requests()
    desk.open()
    return desk


def rows(page, column=0):
    """Return a column of the table of errors, in the order that is seen."""
    script = """
        const rows = [...document.querySelectorAll("#errors tbody tr")];
        const seen = rows.filter((row) => row.offsetHeight > 0);
        return seen.map((row) => row.cells[arguments[0]].textContent);
    """
    return list(page.run(script, column))


def test_nothing_is_loaded_complains_or_runs_that_is_not_ours(page):
    """The policy of the page holds even where an element should get in."""
    assert page.complaints() == []
    assert page.requests() == ["report.html"]
    assert page.driver.title == "Quantization audit of demo"
    assert "demo: 19 checkpoints, 1 soup" in page.one(".verdict").text
    page.open()
    page.run("""
        const made = document.createElement("div");
        made.innerHTML = '<img src="https://example.org/x.png" onerror="window.hurt = 1">';
        const script = document.createElement("script");
        script.textContent = "window.hurt = 2";
        document.body.append(made, script);
    """)
    assert page.run("return window.hurt") is None
    assert any("Content Security Policy" in said for said in page.complaints())
    assert page.requests() == ["report.html"]
    page.open("harsh")  # names of others stay names
    assert page.complaints() == []
    labels = [printable(subject.label) for subject in named(HARSH).subjects]
    assert page.texts("#errors tbody th code") == labels


def test_sections_and_a_long_series_are_folded_until_they_are_asked_for(page):
    button, whole = page.one("#fold"), len(shown().subjects)
    assert (button.text, len(rows(page))) == (f"Show all {whole} subjects", 16)
    assert button.get_attribute("aria-expanded") == "false"
    button.click()
    assert (button.text, len(rows(page))) == ("Show 16 subjects", whole)
    assert button.get_attribute("aria-expanded") == "true"
    page.driver.refresh()
    is_open = "return [...document.querySelectorAll('main > section > details')].map((e) => e.open)"
    assert not any(page.run(is_open))
    page.one("nav a[href='#added-loss']").click()
    opened = page.one("#added-loss > details")
    WebDriverWait(page.driver, 5).until(lambda _: opened.get_attribute("open"))
    assert sum(page.run(is_open)) == 1
    for expected in (all, lambda unfolded: not any(unfolded)):
        page.one("#unfold").click()
        assert expected(page.run(is_open))


# ------------------------------------------------------------------ tables


def test_a_click_or_a_key_sorts_and_a_second_one_turns_the_order_around(page):
    page.one("#fold").click()
    column = 1 + page.texts("#errors thead th").index("gptq-4bit")
    for order in ("ascending", "descending"):
        page.one(f"#errors thead th:nth-child({column}) button").click()
        head = page.one(f"#errors thead th:nth-child({column})")
        assert head.get_attribute("aria-sort") == order
        values = [float(text.split()[0].rstrip(",!?")) for text in rows(page, column - 1)]
        assert values == sorted(values, reverse=order == "descending")
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#errors [aria-sort]")) == 1
    column = 1 + page.texts("#errors thead th").index("bnb-int8")


def test_the_keyboard_sorts_and_what_is_not_measured_comes_last(page):
    page.one("#fold").click()
    column = 1 + page.texts("#errors thead th").index("bnb-int8")
    for _ in range(2):
        page.one(f"#errors thead th:nth-child({column}) button").send_keys(Keys.ENTER)
        last = rows(page, column - 1)[-5:]
        assert last == ["- not measured"] * 5
    page.one("#errors thead th:first-child button").send_keys(Keys.SPACE)
    assert rows(page) == [subject.label for subject in shown().subjects]


def test_other_tables_sort_by_number_and_by_word(page):
    table = "#soup-against-ingredients > details > .scroll table"
    for column, kind in ((1, str), (3, float)):
        page.one(f"{table} th:nth-child({column}) button").click()
        cells = page.texts(f"{table} tbody tr > :nth-child({column})")
        values = [kind(cell.split()[0]) for cell in cells]
        assert values == sorted(values)


# ------------------------------------------------------------------ figures


def tip(page, figure="trajectory"):
    """Return the lines of a figure's tooltip."""
    return page.texts(f"#figure-{figure} .tip span")


def test_marks_answer_to_the_pointer_and_are_reached_by_the_keyboard(page):
    mark = page.one('#figure-trajectory .series[data-series="2"] use.mark')
    # Two frames later the page has said that it moved, which closes tooltips.
    script = """
        arguments[0].scrollIntoView({ block: "center", behavior: "instant" });
        requestAnimationFrame(() => requestAnimationFrame(arguments[1]));
    """
    page.driver.execute_async_script(script, mark)
    assert tip(page) == []
    ActionChains(page.driver).move_to_element(mark).perform()
    assert tip(page) == [
        "stage1-step500",
        "gptq-4bit: 0.156 % [0.136, 0.178]",
        "step 500, 4.1M tokens, learning rate 0.003",
    ]
    page.one("#figure-trajectory .plot").send_keys(Keys.ESCAPE)
    assert tip(page) == []
    page.open()
    page.run("document.querySelector('#figure-trajectory .legend li:last-child button').focus()")
    ActionChains(page.driver).send_keys(Keys.TAB).perform()
    assert page.run("return document.activeElement.className") == "plot"
    assert tip(page)[:2] == ["stage1-step500", "rtn-4bit: 0.344 % [0.275, 0.433]"]
    assert page.one("#figure-trajectory .tip").get_attribute("role") == "status"
    steps = (
        (Keys.ARROW_RIGHT, "stage1-step1000", "rtn-4bit"),
        (Keys.ARROW_DOWN, "stage1-step1000", "rtn-3bit"),
        (Keys.END, "soup", "rtn-3bit"),
        (Keys.ARROW_RIGHT, "soup", "rtn-3bit"),
        (Keys.ARROW_UP, "soup", "rtn-4bit"),
        (Keys.HOME, "stage1-step500", "rtn-4bit"),
    )
    for key, subject, scheme in steps:
        ActionChains(page.driver).send_keys(key).perform()
        first, second, *_ = tip(page)
        assert (first, second.partition(":")[0]) == (subject, scheme)
    box = page.one("#figure-trajectory .tip").rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1200

    for name in ("quantized", "soups", "pareto", "plane"):  # every figure says what its marks are
        page.one(f"#figure-{name} .plot").send_keys(Keys.ARROW_RIGHT)
        assert len(tip(page, name)) == 3


def test_a_scheme_is_taken_out_of_a_figure_and_the_command_copied(page):
    series = page.one('#figure-trajectory .series[data-series="0"]')
    button = page.one("#figure-trajectory .legend button")
    assert (button.text, series.is_displayed()) == ("rtn-4bit", True)
    button.click()
    assert (button.get_attribute("aria-pressed"), series.is_displayed()) == ("false", False)
    page.one("#figure-trajectory .plot").send_keys(Keys.ARROW_RIGHT)
    assert tip(page)[1].startswith("rtn-3bit")
    button.send_keys(Keys.SPACE)
    assert (button.get_attribute("aria-pressed"), series.is_displayed()) == ("true", True)

    command = page.texts("pre.command")[0]
    assert "qaudit scan demo" in command
    page.one("pre.command + p button").click()
    script = """
        const done = arguments[0];
        const status = document.querySelector("pre.command + p .copied");
        const tell = () => done([status.textContent, getSelection().toString()]);
        if (status.textContent) tell();
        else new MutationObserver(tell).observe(status, { childList: true });
    """
    said, selected = page.driver.execute_async_script(script)
    assert said == "copied" or (said.startswith("selected") and selected.strip() == command)


# ------------------------------------------------------------------ surfaces


def test_the_page_fits_its_window_and_names_of_tasks_stay_whole(page):
    script = """
    const name = [...document.querySelectorAll("tbody th code")]
      .find((e) => e.textContent === "commonsense_qa");
    const room = name.closest(".scroll");
    return [name.getClientRects().length, room.scrollWidth - room.clientWidth];
    """
    for width in (400, 1100):
        page.open("tasks", width=width)
        page.unfold()
        lines, hidden = page.run(script)
        assert lines == 1
        assert (hidden == 0) == (width == 1100)  # a wide window holds all columns
    for width in (400, 1200):
        page.open(width=width)
        page.unfold()
        assert page.run("return document.documentElement.scrollWidth") <= width
    page.open("undecided", width=390)  # a phone shows every status without scrolling sideways
    assert page.texts("#ships tbody td:last-child")[1:] == ["UNDECIDED (warns)", "INCOMPLETE"]
    script = "const e = document.querySelector('#ships').parentElement;"
    assert page.run(f"{script} return e.scrollWidth - e.clientWidth") == 0


@pytest.mark.parametrize(("scheme", "rules"), [("light", WCAG), ("dark", COLOURS)])
def test_nothing_keeps_anybody_from_reading(page, scheme, rules):
    """Hold the page, unfolded, to what axe knows of the guidelines' levels A and AA.

    In the dark only colours are different.
    """
    page.open(scheme=scheme)
    ground = page.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    # The tables of schemes are alike; two of them are enough.
    all_but = "details:not(#scheme-by-scheme details:nth-of-type(n + 3))"
    page.run("document.querySelectorAll(arguments[0]).forEach((e) => (e.open = true))", all_but)
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": axe})
    script = """
        const done = arguments[1];
        const settings = { runOnly: arguments[0], resultTypes: ["violations"] };
        axe.run(document, settings).then(done, (error) => done({ error: String(error) }));
    """
    found = page.driver.execute_async_script(script, rules)
    violations = [
        (rule["id"], node["target"], node["failureSummary"])
        for rule in found["violations"]
        for node in rule["nodes"]
    ]
    assert violations == []
    assert "color-contrast" in [rule["id"] for rule in found["passes"]]
    assert len(found["passes"]) > 15 or scheme == "dark"


def test_paper_is_white_and_holds_everything_that_is_folded(page):
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    document = pypdfium2.PdfDocument(base64.b64decode(printed["data"]))
    text = "".join("".join(p.get_textpage().get_text_bounded() for p in document).split())
    document.close()
    for spec, _, _ in sample.SCHEMES.values():
        assert spec in text
    for words in (
        *(s.label for s in shown().subjects),
        "Not covered: kinds of text rarer than",
        "torch",
        "pip install",
    ):
        assert "".join(words.split()) in text
    assert "Showall" not in text
    assert "Copy" not in text
    page.media("dark", "print")
    style = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    assert page.run(style) == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    assert not any(b.is_displayed() for b in page.driver.find_elements(By.CSS_SELECTOR, "p button"))
    assert not page.one("nav").is_displayed()
    assert len(rows(page)) == len(shown().subjects)


def test_without_script_everything_can_be_read(page):
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.driver.get((page.folder / "report.html").as_uri())
        assert page.driver.find_elements(By.TAG_NAME, "button") == []
        page.one("#added-loss summary").click()
        seen = page.driver.find_elements(By.CSS_SELECTOR, "#errors tbody tr")
        assert len([row for row in seen if row.is_displayed()]) == len(shown().subjects)
        assert page.driver.find_elements(By.CSS_SELECTOR, "use.mark title")
    finally:
        page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
