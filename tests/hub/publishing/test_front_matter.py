"""A README's metadata: what is added, what is replaced, and that no other key moves by a byte."""

import difflib
import math
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.errors import HubError
from qaudit.hub.metadata import Metadata, metadata_of, with_metadata
from qaudit.types import Ref, TextFile
from tests.support import sample

URL = "https://huggingface.co/o/m/blob/main/qaudit/audit.json"
BODY = "\n# My model\n\nSome words.\n"


def result(value, name="ours", url=URL):
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": "o/text", "name": "o/text"},
        "metrics": [{"type": "perplexity", "value": value, "name": name}],
        "source": {"name": "qaudit", "url": url},
    }


WANTED = Metadata(("qaudit",), ("o/a", "o/b"), "m", (result(12.5),))
TAG = Metadata(("qaudit",))


def edited(front, wanted=WANTED):
    text, notes = with_metadata(f"---\n{front}---\n{BODY}", wanted, "o/m")
    assert notes == ()
    assert text.endswith(f"---\n{BODY}")
    return text


def lines_changed(before, after):
    """Return the lines that went and those that came."""
    moved = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [m[2:] for m in moved if m[0] == "-"], [m[2:] for m in moved if m[0] == "+"]


def test_what_is_added_is_what_the_library_itself_would_write_and_reads():
    text, notes = with_metadata("# My model\n", WANTED, "o/m")
    assert notes == ()
    assert text.endswith("---\n\n# My model\n")
    data = ModelCard(text).data
    assert data.tags == ["qaudit"]
    assert data.base_model == ["o/a", "o/b"]
    assert data.base_model_relation == "merge"
    (found,) = data.eval_results
    assert (found.metric_type, found.metric_value) == ("perplexity", 12.5)
    assert (found.source_name, found.source_url) == ("qaudit", URL)
    theirs = ModelCardData(model_name="m", eval_results=[found]).to_dict()
    ours = yaml.safe_load(edited("", Metadata((), (), "m", (result(12.5),))).split("---\n")[1])
    assert ours == theirs


ODD = """\
# what follows was written by hand
license:   apache-2.0   # keep
language: [en, 'de']
datasets:
  - a/b   # the first

  # and the second
  - "c/d"
widget:
- text: |
    two
    lines

thumbnail: 'it''s'
"""


def test_comments_quotes_order_and_blank_lines_stay_and_a_tag_joins_a_list_of_any_form():
    gone, came = lines_changed(f"---\n{ODD}---\n{BODY}", edited(ODD))
    assert (gone, came[:2]) == ([], ["tags:", "- qaudit"])
    for before, after in (
        (ODD, f"{ODD}tags:\n- qaudit\n"),
        ("tags: ['a', b,]\nx: 1 # c\n", "tags:\n- a\n- b\n- qaudit\nx: 1 # c\n"),
        ("tags: []\nlanguage: no\n", "tags:\n- qaudit\nlanguage: no\n"),
        ("tags:\n    - a\n\n# c\nx: 1.10\n", "tags:\n- a\n- qaudit\n\n# c\nx: 1.10\n"),
        ("a: &t\n- b\ntags: *t\n", "a: &t\n- b\ntags:\n- b\n- qaudit\n"),
        ("tags: [a, qaudit]\n", "tags: [a, qaudit]\n"),
        ("# nothing\n", "# nothing\ntags:\n- qaudit\n"),
        ("", "tags:\n- qaudit\n"),
    ):
        assert edited(before, TAG) == f"---\n{after}---\n{BODY}"
    front = "base_model: [o/b, o/a]\nbase_model_relation: merge\n"  # named already
    assert edited(front, Metadata((), ("o/a", "o/b"))) == f"---\n{front}---\n{BODY}"


THEIRS = """\
license: mit
model-index:   # ours below
- name: My Model
  results:
  - task: {type: text-generation}   # by hand
    dataset:
      type: x/y
      name: Y
    metrics:
    - type: accuracy
      value: 0.50
  # a word between
  - task:
      type: text-generation
    dataset:
      type: o/text
      name: old
    metrics:
    - type: perplexity
      value: 99.0
    source:
      name: qaudit
      url: https://huggingface.co/old/name/blob/main/qaudit/audit.json
  - task: {type: other}
    dataset: {type: z, name: z}
    metrics:
    - {type: f1, value: 1}
    source: {name: qaudit, url: https://elsewhere.example/board}
pipeline_tag: text-generation
"""


def test_our_results_are_replaced_and_those_of_others_are_not_touched():
    wanted = Metadata((), (), "m", (result(12.5), result(13.5, "another")))
    text = edited(THEIRS, wanted)
    gone, came = lines_changed(f"---\n{THEIRS}---\n{BODY}", text)
    assert any("99.0" in line for line in gone)
    assert not any("license" in line or "pipeline_tag" in line for line in (*gone, *came))
    values = [r.metric_value for r in ModelCard(text).data.eval_results]
    assert values == [0.5, 1, 12.5, 13.5]
    text = edited(THEIRS, Metadata())  # and those that are no longer wanted go
    assert [r.metric_value for r in ModelCard(text).data.eval_results] == [0.5, 1]
    again, _ = with_metadata(edited("license: mit\n", WANTED), Metadata(("qaudit",)), "o/m")
    assert "model-index" not in again
    before = f"---\n{THEIRS}---\n{BODY}"
    plain, _ = with_metadata(before, WANTED, "o/m")
    text, _ = with_metadata(before.replace("\n", "\r\n"), WANTED, "o/m")
    assert text == plain.replace("\n", "\r\n")
    one = Metadata((), (), "m", (result(1.0),))  # a model that would have no result goes with ours
    two = edited("x: 1\n", one).split("---\n")[1]
    two += (
        "- name: other\n  results:\n  - task: {type: t}\n    dataset: {type: d, name: d}\n"
        "    metrics: [{type: f1, value: 1}]\n"
    )
    text = edited(two, Metadata())
    assert [e["name"] for e in yaml.safe_load(text.split("---\n")[1])["model-index"]] == ["other"]


def test_what_cannot_be_added_is_told_and_the_rest_is():
    for front, wanted, said in (
        ("tags: word\n", TAG, "`tags` is not a list"),
        ("base_model: o/z\n", WANTED, "`base_model` names other models"),
        ("base_model:\n", WANTED, "`base_model` is there and empty"),
        ("model-index: []\n", WANTED, "`model-index` is there and empty"),
        ("model-index: [word]\n", WANTED, "`model-index` has no list of results"),
    ):
        text, notes = with_metadata(f"---\n{front}---\n{BODY}", wanted, "o/m")
        assert len(notes) == 1
        assert said in notes[0]
        assert front in text


def test_metadata_that_cannot_be_read_is_refused():
    for readme, why in (
        ("---\nlicense: mit\n# no end\n", "it does not end"),
        ("---\na: [1\n---\n", "line 3: "),
        ("---\n- a\n- b\n---\n", "not a table of one key in a line"),
        ("---\n{a: 1}\n---\n", "not a table of one key in a line"),
        ("---\na: 1\na: 2\n---\n", "line 3: key `a` is there twice"),
        ("---\na: !!python/object:os.system x\n---\n", "could not determine a constructor"),
        ("---\na: \x07\n---\n", "control characters"),
        ("---\na: 2026-13-45\n---\n", "`2026-13-45` is no date"),
        ("\ufeff---\na: 1\n---\n", "byte order mark"),
    ):
        with pytest.raises(HubError, match=r"front matter of `README\.md` in `o/m`") as raised:
            with_metadata(readme, WANTED, "o/m")
        assert why in raised.value.message
        assert "\x07" not in raised.value.message
        assert "fix it" in raised.value.hint
    for front in ("tags: &l [a]\nlanguage: *l\n", "  x: 1\n"):
        with pytest.raises(HubError, match="nothing can be added to without changing the rest"):
            with_metadata(f"---\n{front}---\n", TAG, "o/m")


names = st.sampled_from(["license", "language", "tags", "widget", "x y", "datasets", "base_model"])
words = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=8)
values = st.one_of(words, st.integers(), st.none(), st.lists(words, max_size=3), st.booleans())


@settings(max_examples=25)
@given(
    table=st.dictionaries(names, values, max_size=5),
    flow=st.sampled_from([None, True, False]),
    comment=st.sampled_from(["", "# by hand\n", "\n"]),
    rows=st.lists(st.booleans(), max_size=4),
    width=st.sampled_from([20, 80]),
)
def test_any_metadata_says_the_same_afterwards_and_a_second_edit_changes_nothing(
    table, flow, comment, rows, width
):
    if rows:
        found = [result(k, url=URL if ours else "https://x.example") for k, ours in enumerate(rows)]
        table = {**table, "model-index": [{"name": "n", "results": found}]}
    front = yaml.safe_dump(table, default_flow_style=flow, allow_unicode=True, width=width)
    front = "" if not table else comment + front + comment
    if front.removeprefix(comment).startswith("{"):
        return  # refused, see above
    before = f"---\n{front}---\n{BODY}"
    text, notes = with_metadata(before, WANTED, "o/m")
    again, _ = with_metadata(text, WANTED, "o/m")
    assert again == text
    said = yaml.safe_load(text.split("---\n")[1])
    for name, value in table.items():
        if name not in ("tags", "model-index", "base_model"):
            assert said[name] == value
    if "tags" not in table or isinstance(table["tags"], list | None):
        assert [t for t in said["tags"] if t != "qaudit"] == [
            t for t in table.get("tags") or [] if t != "qaudit"
        ]
    found = said["model-index"][0]["results"]
    if not any("model-index" in note for note in notes):
        kept = [k for k, ours in enumerate(rows) if not ours]
        assert [r["metrics"][0]["value"] for r in found if r["source"]["url"] != URL] == kept
        assert [r["metrics"][0]["value"] for r in found if r["source"]["url"] == URL] == [12.5]
    gone, _ = lines_changed(before, text)
    assert not {line for line in gone if line.startswith("#")}


def test_aliases_that_stand_for_millions_are_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12)]
    for bomb in ("\n".join(lines), "\n".join(["m0: &m0 {k: 1}", *(
        f"m{k}: &m{k} {{<<: [{', '.join([f'*m{k - 1}'] * 9)}]}}" for k in range(1, 12)
    )])):  # fmt: skip
        with pytest.raises(HubError, match="more than 100000 items"):
            with_metadata(f"---\n{bomb}\n---\n", Metadata(tags=("qaudit",)), "a/b")


@given(front=st.text(alphabet="ab:-[]{}&*<\n '\"#|>?!%@0\t", max_size=60))
def test_any_front_matter_is_edited_or_refused(front):
    try:
        edited, _ = with_metadata(f"---\n{front}\n---\n", Metadata(tags=("qaudit",)), "a/b")
    except HubError:
        return
    assert "qaudit" in edited or "tags" in front


# What a repository's metadata may show, and whose models a soup is based on.
TEXT = TextFile("hf://datasets/o/text/e.jsonl", "o/text", "c" * 40, "e.jsonl", 9, "0" * 64)
HERE = "me/soup"


def audit(pick="soup", home="o/run"):
    """Return the sample with a pick, its checkpoints in a repository or in folders."""
    made = sample.audit()

    def moved(checkpoint):
        ref = Ref(home or "/runs", checkpoint.label)
        return replace(checkpoint, ref=ref, commit=checkpoint.commit if home else None)

    subjects = tuple(
        replace(s, members=tuple((moved(c), w) for c, w in s.members)) for s in made.subjects
    )
    recipe = replace(made.plan.recipe, evaluation=TEXT.source)
    plan = replace(made.plan, recipe=recipe, texts=(TEXT,))
    return replace(made, subjects=subjects, plan=plan, pick=replace(made.pick, subject=pick))


def test_the_soup_that_was_picked_is_a_merge_of_its_members_that_are_elsewhere():
    wanted, notes = metadata_of(audit(), HERE, None)
    assert wanted.base_models == ("o/run",)
    assert len(wanted.results[0]["metrics"]) == 1 + len(sample.SCHEMES)
    assert any("`me/soup` is taken for `soup`" in note for note in notes)
    # Members that are folders have no name on the Hub, and no model is its own base.
    assert metadata_of(audit(home=None), HERE, None)[0].base_models == ()
    named, _ = metadata_of(audit(), "o/run", "soup")
    assert (bool(named.results), named.base_models) == (True, ())


def test_what_was_not_audited_has_no_results():
    for made, repo in ((audit(), "o/run"), (audit(pick="stage1-step500"), HERE)):
        wanted, notes = metadata_of(made, repo, None)
        assert (wanted.base_models, wanted.results, wanted.tags) == ((), (), ("qaudit",))
        assert any("none of those audited" in note for note in notes)


def test_weights_speak_louder_than_the_pick():
    made = audit()
    other = made.subjects[3]
    weights = {file.sha256 for file in other.first.files} | {"more"}
    wanted, _ = metadata_of(made, "me/x", None, weights=weights)
    scores = {s.perplexity for s in made.measurements if s.subject == other.label}
    assert {m["value"] for m in wanted.results[0]["metrics"]} == scores
    assert metadata_of(made, "me/x", None, weights={"more"})[0].results != wanted.results


def test_a_number_that_is_none_is_left_out():
    made = audit()
    for value in (math.inf, math.nan):
        scores = tuple(
            replace(s, perplexity=value) if (s.subject, s.scheme) == ("soup", "rtn-3bit") else s
            for s in made.measurements
        )
        wanted, _ = metadata_of(replace(made, measurements=scores), HERE, None)
        schemes = [m["args"]["scheme"] for m in wanted.results[0]["metrics"]]
        assert sorted(schemes) == sorted({"fp", *sample.SCHEMES} - {"rtn-3bit"})
