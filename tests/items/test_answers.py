"""Files of lm-eval and inspect, as their releases wrote them, become tasks of both streams."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from qaudit.errors import UsageError
from qaudit.items.answered import is_greedy, paired, read_answers

ANSWERS = Path(__file__).parent / "answers"
SAMPLES = "samples_arguments_2026-11-23T03-20-00.000000.jsonl"
STRICT = "exact_match,strict"


@pytest.fixture
def files(tmp_path):
    shutil.copytree(ANSWERS / "lm-eval", tmp_path / "lm-eval")
    return tmp_path / "lm-eval"


def tasks(base, quantized, metric=STRICT):
    pairs = paired(read_answers([base]), read_answers([quantized]), metric)
    return {before.task: (before, after) for before, after in pairs}


def flips(pair):
    before, after = pair
    return int((before.greedy & ~after.greedy).sum()), int((~before.greedy & after.greedy).sum())


def edited(path, change):
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def refusal(base, quantized, metric=STRICT):
    with pytest.raises(UsageError) as error:
        tasks(base, quantized, metric)
    assert error.value.hint
    return error.value.message


def test_marks_are_those_of_lm_eval_and_items_are_paired_in_any_order(files):
    measured = tasks(files / "base", files / "q3")
    results = next((files / "base").glob("results_*.json"))
    table = json.loads(results.read_text("utf-8"))["results"]
    assert measured["arguments"][0].greedy.mean() == table["arguments"][STRICT]
    assert measured["choice"][0].greedy.mean() == table["choice"]["acc,none"]
    assert flips(measured["arguments"]) == (1, 1)
    assert flips(measured["choice"]) == (5, 1)
    about = measured["choice"][1].imported
    assert about.about == "lm-eval 0.4.13, acc,none, greedy"
    assert (about.picked_N >= 0).all()
    before = tasks(files / "base", files / "q3")
    for name in ("arguments", "choice"):
        path = next((files / "q3").glob(f"samples_{name}_*"))
        lines = path.read_text("utf-8").splitlines()
        path.write_text("\n".join(reversed(lines)), "utf-8")
    after = tasks(files / "base", files / "q3")
    assert len(before["choice"][0].items) == 15
    assert {name: flips(pair) for name, pair in after.items()} == {
        name: flips(pair) for name, pair in before.items()
    }


def test_another_prompt_another_item_and_fewer_items_do_not_pair(files):
    path, original = files / "q3" / SAMPLES, (files / "q3" / SAMPLES).read_text("utf-8")

    def with_examples(line):
        line["arguments"]["gen_args_0"]["arg_0"] = "An example.\n" + line["doc"]["function"]

    edited(path, with_examples)
    assert "14 of the 14 items" in refusal(files / "base", files / "q3")
    path.write_text(original, "utf-8")
    edited(path, lambda line: line["doc_id"] or line["doc"].update(arguments="other"))
    assert "1 of the 14 items" in refusal(files / "base", files / "q3")
    path.write_text("\n".join(original.splitlines()[:-2]), "utf-8")
    assert "cannot be imported" in refusal(files / "base", files / "q3")


def test_greedy_answers_are_not_compared_with_sampled_ones_nor_other_settings(files):
    def sampled(line):
        line["arguments"]["gen_args_0"]["arg_1"].update(do_sample=True, temperature=0.7)

    edited(files / "q3" / SAMPLES, sampled)
    assert "are greedy and those in" in refusal(files / "base", files / "q3")
    edited(files / "base" / SAMPLES, sampled)
    before, _ = tasks(files / "base", files / "q3")["arguments"]
    assert before.imported.about.endswith("sampled")
    other = {"max_gen_toks": 7}
    edited(
        files / "q3" / SAMPLES, lambda line: line["arguments"]["gen_args_0"]["arg_1"].update(other)
    )
    assert "was generated with" in refusal(files / "base", files / "q3")
    for settings, greedy in (
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.6}, False),
        ({"temperature": 0.6, "do_sample": False}, True),
        ({"temperature": 0, "do_sample": True}, True),
        ({"do_sample": True}, False),
    ):
        assert is_greedy(settings) is greedy


def test_several_metrics_must_be_named_and_marks_are_right_or_wrong(files):
    assert "`exact_match,strict`, `exact_match,flexible`" in refusal(
        files / "base", files / "q3", None
    )
    assert "no answers have marks `exact`" in refusal(files / "base", files / "q3", "exact")
    edited(files / "q3" / SAMPLES, lambda line: line.update(exact_match=0.5))
    assert "is 0.5, and a mark is 0 or 1" in refusal(files / "base", files / "q3")


NOT_A_NUMBER, NEVER = float("nan"), float("-inf")


def test_numbers_that_decide_nothing_may_be_no_numbers(files):
    """lm-eval writes NaN and infinities as Python does."""
    before = tasks(files / "base", files / "q3")

    def unread(line):
        line["doc"]["weight"] = NOT_A_NUMBER
        line["resps"] = [[[NEVER, False]]]
        line["metrics"].append("perplexity")
        line["perplexity"] = NOT_A_NUMBER

    for side in ("base", "q3"):
        edited(files / side / SAMPLES, unread)
        (results,) = (files / side).glob("results_*.json")
        table = json.loads(results.read_text("utf-8"))
        results.write_text(json.dumps(table | {"stderr": NOT_A_NUMBER}), "utf-8")
    after = tasks(files / "base", files / "q3")
    assert {name: flips(pair) for name, pair in after.items()} == {
        name: flips(pair) for name, pair in before.items()
    }


def test_numbers_that_decide_are_named_by_item_and_field(files):
    path = files / "q3" / SAMPLES
    original = path.read_text("utf-8")

    def hot(line):
        line["arguments"]["gen_args_0"]["arg_1"]["temperature"] = NOT_A_NUMBER

    edited(path, lambda line: line["doc_id"] == 1 and line.update(exact_match=NOT_A_NUMBER))
    assert "`exact_match,strict` of item 2 of `arguments`" in refusal(files / "base", files / "q3")
    path.write_text(original, "utf-8")
    edited(path, lambda line: line["doc_id"] == 2 and hot(line))
    assert "`arguments` of item 3 has no finite number" in refusal(files / "base", files / "q3")
    path.write_text(original, "utf-8")
    (choice,) = (files / "q3").glob("samples_choice_*")

    def second_is(loss):
        return lambda line: line["filtered_resps"][1].__setitem__(0, loss)

    for loss in (NEVER, "-inf"):  # lm-eval 0.4.13 writes texts
        edited(choice, second_is(loss))
        assert (tasks(files / "base", files / "q3")["choice"][1].imported.picked_N >= 0).all()
    for loss in (NOT_A_NUMBER, "nan"):
        edited(choice, second_is(loss))
        assert "`filtered_resps` of item 1 has no finite" in refusal(files / "base", files / "q3")


def test_other_versions_other_tasks_and_two_runs_are_refused(files):
    odd = (files / "q3" / SAMPLES).rename(files / "q3" / "samples_<b>.jsonl")
    assert "has the name" in refusal(files / "base", files / "q3")  # that no tool writes
    odd.rename(files / "q3" / SAMPLES)
    results = next((files / "q3").glob("results_*"))
    table = json.loads(results.read_text("utf-8"))
    results.write_text(json.dumps({**table, "lm_eval_version": "0.4.9"}), "utf-8")
    assert "is of lm-eval 0.4.13 and" in refusal(files / "base", files / "q3")
    results.unlink()
    assert "of an unknown version" in refusal(files / "base", files / "q3")
    (files / "q3" / SAMPLES).unlink()
    assert "no answers to `arguments`" in refusal(files / "base", files / "q3")
    assert "both have answers of the task" in refusal(files, files / "q3")


NAN = b'{"filter": "f", "metrics": ["m"], "m": NaN, "doc": 1, "arguments": {}}\n'


@pytest.mark.parametrize("ending", ["jsonl", "json", "eval"])
def test_files_of_anything_else_end_in_a_sentence(ending, tmp_path):
    path = tmp_path / f"samples_x.{ending}"
    for content in (b"", b"\xff\xfe", b"[1]\n", b'{"filter": 1}\n', NAN, b"{" * 100_000):
        path.write_bytes(content)
        assert "cannot be imported" in refusal(path, path)


def archived(log):
    """Write a log in JSON as the archive that it would be, compressed with deflate."""
    document = json.loads(log.read_text("utf-8"))
    samples = document.pop("samples")
    path = log.with_suffix(".eval")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps(document))
        for sample in samples:
            archive.writestr(f"samples/{sample['id']}_epoch_1.json", json.dumps(sample))
    log.unlink()
    return path


def test_logs_of_inspect_are_read_from_both_formats_and_floods_are_not_unpacked(
    tmp_path, monkeypatch
):
    logs = shutil.copytree(ANSWERS / "inspect", tmp_path / "logs")
    pairs = tasks(logs / "base" / "adds.json", logs / "q3" / "adds.json", None)
    assert pairs["adds"][0].imported.about == "inspect 0.3.285, match, greedy"
    assert flips(pairs["adds"]) == (2, 1)
    path = archived(logs / "base" / "adds.json")
    again = tasks(path, archived(logs / "q3" / "adds.json"), None)
    assert flips(again["adds"]) == (2, 1)
    log = ANSWERS / "inspect" / "base" / "pick.eval"
    try:
        pairs = tasks(log, ANSWERS / "inspect" / "q3" / "pick.eval", None)
    except UsageError as error:  # where Python cannot unpack it
        assert "qaudit-llm[inspect]" in error.message
    else:
        assert flips(pairs["pick"]) == (2, 1)
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    for limit, most in (("_MOST_NBYTES", 10_000), ("_MOST_NBYTES_OF_PART", 99)):
        with monkeypatch.context() as patch:
            patch.setattr(f"qaudit.items.answered.{limit}", most)
            assert "unpacks to more than" in refusal(path, path, None)


def test_logs_that_do_not_pair_are_refused(tmp_path):
    base, path = ANSWERS / "inspect" / "base" / "adds.json", tmp_path / "adds.json"
    changes = [
        (lambda log: log.update(status="error"), "its status is error"),
        (lambda log: log["eval"]["config"].update(epochs=4), "it has 4 epochs"),
        (lambda log: log["samples"][2].update(error={"message": "x"}), "ended in an error"),
        (lambda log: log["plan"]["config"].update(temperature=0.6), "are greedy and those"),
        (lambda log: log["samples"][0]["messages"][0].update(content="Be."), "1 of the 6 items"),
        (lambda log: log["samples"][0]["scores"]["match"].update(value="P"), "a mark is 0 or 1"),
        (lambda log: log["samples"][0].update(scores={}), "marked by nothing"),
    ]
    for change, sentence in changes:
        log = json.loads((ANSWERS / "inspect" / "q3" / "adds.json").read_text("utf-8"))
        change(log)
        path.write_text(json.dumps(log), "utf-8")
        assert sentence in refusal(base, path, None)
