"""Text in datasets of the Hub: a source is one file of one commit, or a sentence."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.checkpoints.stamps import text_path
from qaudit.errors import CorpusError, HubError, UsageError
from qaudit.hub.api import Client
from qaudit.hub.fetch import Fetcher
from qaudit.hub.listing import Listing
from qaudit.text.documents import read_choices, read_documents
from qaudit.text.texts import find_text, is_hub_text, parse_source, pinned
from tests.support.hub import Hub


def lines(*texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    data = root / "datasets" / "acme" / "text"
    for revision, word in (("v1", "old"), ("v2", "new")):
        folder = data / revision / "en"
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_bytes(lines(f"{word} one", f"{word} two"))
        (folder / "b.json.gz").write_bytes(gzip.compress(lines(f"{word} zipped")))
        (folder / "bad.json.gz").write_bytes(gzip.compress(lines("good"))[:-12])
        (folder / "odd.jsonl").write_bytes(b'{"body": "the body"}\n')
        (folder / "items.jsonl").write_bytes(
            b'{"question": "q", "choices": ["a", "b"], "answer": 0}\n'
        )
        pyarrow.parquet.write_table(
            pyarrow.table({"text": ["", " = Title = \n", "words\n"]}), folder / "rows.parquet"
        )
    with Hub(root).running() as hub:
        yield hub


@pytest.fixture
def hub(served, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    served.log.clear()
    served.faults.clear()
    return served


def listing(hub, tmp_path, *, offline=False):
    client = Client(hub.url, offline=offline, pause=lambda seconds: None)
    return Listing(client, tmp_path / "known")


def fetched(hub, tmp_path, source):
    asked = listing(hub, tmp_path)
    text = find_text(asked, source)
    fetcher = Fetcher(asked.client, asked, pause=lambda seconds: None)
    return text, fetcher.text(text)


def documents(hub, tmp_path, source):
    _, path = fetched(hub, tmp_path, source)
    return [(d.name, d.text) for d in read_documents(source, path)]


def refusal(source):
    with pytest.raises(UsageError) as caught:
        parse_source(source)
    assert caught.value.code == 2
    assert caught.value.hint
    return caught.value


# ------------------------------------------------------------------------------------- sources


def test_a_source_is_a_file_of_a_dataset_or_refused_with_its_form():
    c4, web = "en/c4-train.00001-of-01024.json.gz", "wikitext-2-raw-v1/test-00000.parquet"
    for source, parts in (
        (f"allenai/c4/{c4}", ("allenai/c4", None, c4)),
        (f"Salesforce/wikitext/{web}", ("Salesforce/wikitext", None, web)),
        ("a/b@v1.2/c.txt", ("a/b", "v1.2", "c.txt")),
        ("a/b@refs/convert/pq/c.parquet", ("a/b", "refs/convert/pq", "c.parquet")),
        ("a/b@refs%2Fpr%2F3/c.md", ("a/b", "refs/pr/3", "c.md")),
        ("a/b/c.jsonl::body", ("a/b", None, "c.jsonl")),
        ("a/b/deep/er/c d.jsonl", ("a/b", None, "deep/er/c d.jsonl")),
    ):
        assert is_hub_text(f"hf://datasets/{source}")
        assert parse_source(f"hf://datasets/{source}") == parts
    for path in ("text.jsonl", "/data/a.txt", "hf/a.txt", "datasets/a/b/c.txt"):
        assert not is_hub_text(path)
    of_dataset = "hf://datasets/allenai/c4"
    for source in (
        "hf://models/org/name/a.txt", "hf://allenai/c4/en/a.json.gz", "hf://allenai/c4",
        of_dataset, f"{of_dataset}/", f"{of_dataset}/en", f"{of_dataset}/en/",
        "hf://datasets/c4", "hf:datasets/a/b/c.txt", "hf://", "HF://datasets/a/b/c.txt",
    ):  # fmt: skip
        assert is_hub_text(source)
        error = refusal(source)
        assert re.search("not a file of|not text that|not name a file", error.message)
        assert re.search("write it as hf://datasets/org/name|name a file", error.hint)
    for name in ("picture.png", "data.jsonl.zst", "weights.safetensors", "README"):
        error = refusal(f"hf://datasets/a/b/{name}")
        assert "is not text that can be read" in error.message
        assert ".parquet" in error.hint
    for source in (
        *(f"a/b/{path}.txt" for path in ("../../etc/x", "/etc/x", "./c", "c\\..\\d", "c\x00")),
        *(f"a/b/{path}.txt" for path in ("c\n", "c\u202etxt", "c" * 2000)),
        *("../b/c.txt", "a/..@v1/c.txt", ".a/b/c.txt", "a--b/c/d.txt"),
        *(f"a/b@{name}/c.txt" for name in ("..", "%2e%2e%2fx", "v1%00", "v 1", "")),
    ):
        assert refusal(f"hf://datasets/{source}").message.isprintable()


@given(st.text(max_size=60), st.sampled_from(["", "hf:", "hf://datasets/", "hf://datasets/a/b/"]))
def test_any_text_at_all_is_a_plain_path_or_a_sentence(text, start):
    try:
        repo, revision, path = parse_source(start + text)
    except UsageError as error:
        assert error.message.isprintable()
        return
    assert all(part not in ("", ".", "..") for part in f"{repo}/{path}".split("/"))
    assert ".." not in (revision or "")
    inside = Path("/cache") / path
    assert inside.resolve().is_relative_to("/cache")


# ------------------------------------------------------------------------------------- finding


def test_a_text_is_pinned_to_a_commit_and_to_its_bytes(hub, tmp_path):
    asked = listing(hub, tmp_path)
    text = find_text(asked, "hf://datasets/acme/text/en/a.jsonl")
    raw = lines("new one", "new two")
    assert text.nbytes == len(raw)
    git_id = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    assert text.sha256 == f"git:{git_id}"
    assert asked.client.calls == 2
    assert pinned(text) == f"hf://datasets/acme/text@{text.commit}/en/a.jsonl"
    again = find_text(asked, pinned(text))
    assert (again.commit, again.sha256) == (text.commit, text.sha256)
    assert asked.client.calls == 2  # a commit never changes
    field = find_text(asked, "hf://datasets/acme/text/en/odd.jsonl::body")
    assert pinned(field).endswith("/en/odd.jsonl::body")


def test_a_text_is_read_as_a_local_one_is_and_choices_too(hub, tmp_path):
    for place, texts in (
        ("@v1/en/a.jsonl", ["old one", "old two"]),
        ("/en/odd.jsonl::body", ["the body"]),
        ("/en/b.json.gz", ["new zipped"]),
        ("/en/rows.parquet", ["", " = Title = \n", "words\n"]),
    ):
        file = place.rpartition("/")[2].partition("::")[0]
        wanted = [(f"{file}:{number}", text) for number, text in enumerate(texts, 1)]
        assert documents(hub, tmp_path, f"hf://datasets/acme/text{place}") == wanted
    source = "hf://datasets/acme/text/en/items.jsonl"
    (item,) = read_choices(source, fetched(hub, tmp_path, source)[1])
    assert item.name == "items.jsonl:1"
    other = "hf://datasets/acme/text/en/a.jsonl"
    with pytest.raises(CorpusError, match=f"line 1 of `{other}` has no `context`"):
        read_choices(other, fetched(hub, tmp_path, other)[1])


def test_missing_files_are_named_and_known_ones_lie_in_a_cache(hub, tmp_path):
    asked = listing(hub, tmp_path)
    with pytest.raises(HubError) as caught:
        find_text(asked, "hf://datasets/acme/text/en/b.jsonl.gz")
    assert "`en/b.jsonl.gz`" in caught.value.message
    assert asked.client.calls == 2
    with pytest.raises(HubError, match=r"`fr/a\.jsonl`"):
        find_text(asked, "hf://datasets/acme/text/fr/a.jsonl")
    source = "hf://datasets/acme/text/en/a.jsonl"
    text = find_text(listing(hub, tmp_path), source)
    hub.log.clear()
    assert find_text(listing(hub, tmp_path, offline=True), source) == text
    with pytest.raises(HubError) as caught:
        find_text(listing(hub, tmp_path, offline=True), "hf://datasets/acme/text/en/b.json.gz")
    assert "HF_HUB_OFFLINE" in caught.value.message + caught.value.hint
    assert hub.log == []
    from huggingface_hub import hf_hub_download

    text, path = fetched(hub, tmp_path, "hf://datasets/acme/text/en/rows.parquet")
    assert path == text_path(text)
    found = hf_hub_download(
        "acme/text", "en/rows.parquet", repo_type="dataset", revision=text.commit,
        cache_dir=tmp_path / "cache", local_files_only=True,
    )  # fmt: skip
    assert Path(found) == path


def test_what_cannot_be_read_is_named_as_it_was_asked_for(hub, tmp_path):
    for name, said in (
        ("bad.json.gz", "`{en}bad.json.gz` is damaged or cut short"),
        ("odd.jsonl", "line 1 of `{en}odd.jsonl` has no field"),
        ("a.jsonl::body", "line 1 of `{en}a.jsonl` has no field `body`"),
        ("rows.parquet::body", "`{en}rows.parquet` has no field `body`"),
    ):
        with pytest.raises(CorpusError) as caught:
            documents(hub, tmp_path, f"hf://datasets/acme/text/en/{name}")
        assert said.format(en="hf://datasets/acme/text/en/") in caught.value.message
        assert "download" not in caught.value.hint
        assert str(tmp_path) not in caught.value.message + caught.value.hint

    for address, path, message, hint in (
        ("https://huggingface.co/datasets/acme/text/blob/v1/en/a.jsonl", None, "",
         "`hf://datasets/org/name/path`"),
        ("hf://datasets/a/b/c.jsonl", tmp_path / "c.jsonl",
         "there is no text file `hf://datasets/a/b/c.jsonl`", "run the same command again"),
    ):  # fmt: skip
        with pytest.raises(CorpusError) as caught:
            list(read_documents(address, path))
        assert not message or caught.value.message == message
        assert hint in caught.value.hint
