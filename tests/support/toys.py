"""Toy data with the field names of paper A's twelve tasks, as data sets of the Hub lay them out.

Each folder is a snapshot of the data set that the bundled task of lm-eval names, with the files
that it has there: parquet with a README, or the archive of PubMedQA.
"""

import json
import random
import zipfile

import pyarrow
import pyarrow.parquet
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.support.models import VOCABULARY, text

DATA = {
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", ("train", "validation", "test")),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", ("train", "validation", "test")),
    "openbookqa": ("allenai/openbookqa", "main", ("train", "validation", "test")),
    "piqa": ("baber/piqa", "", ("train", "validation")),
    "hellaswag": ("Rowan/hellaswag", "", ("train", "validation")),
    "winogrande": ("allenai/winogrande", "winogrande_xl", ("train", "validation")),
    "mathqa": ("regisss/math_qa", "", ("train", "validation", "test")),
    "sciq": ("allenai/sciq", "", ("train", "validation", "test")),
    "social_iqa": ("lighteval/siqa", "", ("train", "validation")),
    "commonsense_qa": ("tau/commonsense_qa", "", ("train", "validation")),
}
WORDS = (
    *("the", "a", "list", "of", "values", "returns", "an", "object", "with", "key", "and", "index"),
    *("when", "function", "is", "called", "module", "import", "string", "number", "file", "path"),
    *("read", "write", "error", "raised", "if", "not", "found", "true", "false", "default"),
    *("class", "method", "while", "loop", "over", "items", "sorted", "caf\u00e9", "\u6f22\u5b57"),
)


def write(root, subjects, documents=9, seed=0):
    """Write every data set below a folder, as org/name; `subjects` are those of MMLU."""
    rng = random.Random(seed)
    configs = {}
    mmlu = [("mmlu", ("cais/mmlu", name, ("dev", "test"))) for name in subjects]
    for task, (repo, name, splits) in (*DATA.items(), *mmlu):
        files = {split: f"{name or 'data'}/{split}-00000-of-00001.parquet" for split in splits}
        for path in files.values():
            _parquet(root / repo / path, [_document(task, rng) for _ in range(documents)])
        configs.setdefault(repo, []).append(_config(name or "default", files))
    for repo, some in configs.items():
        text = f"---\nconfigs: {json.dumps(some)}\n---\n"
        (root / repo / "README.md").write_text(text, encoding="utf-8")
    _pubmedqa(root / "bigbio" / "pubmed_qa", rng, documents)
    return root


def write_data(folder, name, splits):
    """Write a data set of one configuration."""
    files = {split: f"{name}/{split}.parquet" for split in splits}
    for split, rows in splits.items():
        _parquet(folder / files[split], rows)
    text = f"---\nconfigs: {json.dumps([_config(name, files)])}\n---\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _config(name, files):
    splits = [{"split": split, "path": path} for split, path in files.items()]
    return {"config_name": name, "data_files": splits}


def _parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _pubmedqa(folder, rng, documents):
    folder.mkdir(parents=True)
    (folder / "pubmed_qa.py").write_text("raise RuntimeError('a script of others was run')\n")
    with zipfile.ZipFile(folder / "pqal.zip", "w") as archive:
        for member in ("pqal_fold0/train_set", "pqal_fold0/dev_set", "pqal_test_set"):
            table = {
                str(rng.randrange(10**6)): {
                    "CONTEXTS": [_text(rng, 10, 20) for _ in range(3)],
                    "QUESTION": _text(rng, 5, 10),
                    "final_decision": rng.choice(("yes", "no", "maybe")),
                }
                for _ in range(documents)
            }
            archive.writestr(f"{member}.json", json.dumps(table))


def _text(rng, low, high):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def _mmlu(rng):
    choices = [_text(rng, 1, 5) for _ in range(4)]
    return {"question": _text(rng, 5, 20), "choices": choices, "answer": rng.randint(0, 3)}


def _document(task, rng):
    if task == "mmlu":
        return _mmlu(rng)
    if task in ("arc_easy", "arc_challenge", "commonsense_qa", "openbookqa"):
        count = {"openbookqa": 4, "commonsense_qa": 5}.get(task) or rng.choice((3, 4, 4, 5))
        labels = list("ABCDE"[:count])
        choices = {"text": [_text(rng, 1, 5) for _ in labels], "label": labels}
        question = "question_stem" if task == "openbookqa" else "question"
        return {question: _text(rng, 5, 20), "choices": choices, "answerKey": rng.choice(labels)}
    if task == "piqa":
        both = {"sol1": _text(rng, 5, 15), "sol2": _text(rng, 5, 15)}
        return {"goal": _text(rng, 4, 12), **both, "label": rng.randint(0, 1)}
    if task == "hellaswag":
        return {
            "ctx_a": _text(rng, 8, 20),
            "ctx_b": _text(rng, 0, 4),
            "activity_label": _text(rng, 1, 3),
            "endings": [_text(rng, 5, 15) + "." for _ in range(4)],
            "label": str(rng.randint(0, 3)),
        }
    if task == "winogrande":
        return {
            "sentence": f"{_text(rng, 3, 8)} _ {_text(rng, 2, 6)}.",
            "option1": _text(rng, 1, 1),
            "option2": _text(rng, 1, 1),
            "answer": rng.choice("12"),
        }
    if task == "mathqa":
        options = " , ".join(f"{c} ) {rng.randint(1, 400)}" for c in "abcde")
        return {"Problem": _text(rng, 8, 25), "options": options, "correct": rng.choice("abcde")}
    if task == "sciq":
        names = ("distractor1", "distractor2", "distractor3", "correct_answer")
        options = {name: _text(rng, 1, 3) for name in names}
        return {"support": _text(rng, 0, 30), "question": _text(rng, 5, 12), **options}
    answers = {name: _text(rng, 1, 5) for name in ("answerA", "answerB", "answerC")}
    about = {"context": _text(rng, 6, 15), "question": _text(rng, 4, 8)}
    return {**about, **answers, "label": rng.choice("123")}


SUBJECTS = ("anatomy", "virology")
TASKS = (*DATA, "pubmedqa", *(f"mmlu_{name}" for name in SUBJECTS))
"""Every shape of the twelve tasks; of MMLU two subjects, as tasks of their own."""


def tokenizer(*, adds_bos):
    """Return a small tokenizer, with or without BOS before every text."""
    trained = ByteLevelBPETokenizer()
    lines = [" ".join(WORDS), *(text(seed) for seed in range(20))]
    options = {"special_tokens": ["<s>", "</s>"], "show_progress": False}
    trained.train_from_iterator(lines, vocab_size=VOCABULARY, **options)
    inner = trained._tokenizer
    if adds_bos:
        bos = [("<s>", 0)]
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
