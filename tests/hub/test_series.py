"""From a name on the Hub to a series: which checkpoints, in which order, for how many calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from qaudit.core.course import NO_WEIGHTS, names_in_equal_report
from qaudit.errors import HubError, UsageError
from qaudit.hub.api import Client
from qaudit.hub.listing import Listing
from qaudit.hub.series import find_all, is_hub, with_files
from qaudit.types import Recipe, Ref
from tests.support.fetching import write
from tests.support.hub import Serve, write_headers
from tests.support.names import names_of
from tests.support.series import find_series

RECIPE = Recipe(("x",), ())


def weights(seed, *names):
    names = names or ("model.safetensors",)
    return {"config.json": "{}"} | {name: f"{seed} {name}".encode() for name in names}


WEIGHTS = weights("w")


def shards(total):
    return [f"model-{k:05}-of-{total:05}.safetensors" for k in range(1, total + 1)]


INDEX = "model.safetensors.index.json"


def sharded(seed, total=2):
    named = {f"t{k}": name for k, name in enumerate(shards(total))}
    index = json.dumps({"weight_map": named})
    return {**weights(seed, *shards(total)), INDEX: index}


@dataclass
class Place:
    """A Hub that serves what the test has written, and a folder for what is learned from it."""

    root: Path
    serve: Serve

    def write(self, repo, revisions, **settings):
        found = {
            revision: {n: c if isinstance(c, bytes) else c.encode() for n, c in files.items()}
            for revision, files in revisions.items()
        }
        write(self.root, found, repo)
        settings = {"branch_per_revision": True, **settings}
        (self.root / repo / "repo.json").write_text(json.dumps(settings))

    @cached_property
    def hub(self):
        return self.serve(self.root)

    def listing(self):
        """Open the Hub as another process would."""
        client = Client(self.hub.url, pause=lambda seconds: None)
        return Listing(client, self.root.parent / "kept")

    def find(self, target, recipe=RECIPE):
        return find_series(self.listing(), target, recipe)

    def read(self, target):
        """Return the checkpoints of a target with their files."""
        return with_files(listing := self.listing(), find_series(listing, target, RECIPE))


@pytest.fixture
def place(tmp_path, serve):
    (tmp_path / "hub").mkdir()
    return Place(tmp_path / "hub", serve)


def labels(checkpoints):
    return [c.label for c in checkpoints]


def files(checkpoint):
    return [file.name for file in checkpoint.files]


def calls(hub):
    """Return what was asked, without the hashes in it."""
    return [e["path"].partition("/api/models/")[2] for e in hub.asked("/api/")]


def test_a_folder_comes_before_the_hub(tmp_path, monkeypatch):
    for target in (
        "allenai/OLMo-2-1124-7B@stage1-step1000-tokens5B", "org/name@refs/pr/1",
        "org/name@main//checkpoint-500", "org/name//checkpoint-500", "hf://org/name",
        "TinyLlama/TinyLlama-1.1B-intermediate-step-*", "hf://datasets/org/name",
    ):  # fmt: skip
        assert is_hub(target), target
    for target in ("demo", "/abs/path", "./a/b", "../a", "a/b/c", "recipes/demo.yaml", "~/a",
                   "[red]a[/b]", "org/name@", ""):  # fmt: skip
        assert not is_hub(target), target
    monkeypatch.chdir(tmp_path)
    assert is_hub("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub("org/name")
    assert is_hub("hf://org/name")


def test_a_target_that_is_none_is_refused(place):
    place.write("o/run", {"step3": WEIGHTS})
    for target, sentence in (
        ("hf://datasets/org/name/file", "is not the name of a repository"),
        ("hf://gpt2", "is not the name of a repository"),
        ("hf://org/../x", "is not the name of a repository"),
        ("org/name-*@main", "is a glob of repositories with a revision"),
    ):
        with pytest.raises(UsageError, match=sentence):
            place.find(target)
    assert place.hub.log == []
    with pytest.raises(HubError, match="no repository"):
        place.find("o/nothing-*")
    listing = place.listing()
    with pytest.raises(UsageError, match="`o/run@step3` is given 2 times"):
        find_all(["o/run@step3", "hf://o/run@step3"], RECIPE, lambda: listing)


def test_a_thousand_names_are_one_call_and_known(place, tmp_path):
    folder = tmp_path / "one"
    write_headers(folder, {"w": ("BF16", (2, 2))}, 100)
    hub, repo = place.hub, "allenai/OLMo-2-1124-7B"
    for other in (repo, "allenai/OLMo-2-1124-13B", "EleutherAI/pythia-12b"):
        names = [name for name in names_of(other) if name != "main"][::-1]
        hub.add_names(other, names, folder, main=None, pretend_nbytes=10)

    found = place.find(repo)
    assert calls(hub) == [f"{repo}/refs"]
    assert len(hub.log) == 1
    assert labels(found) == [*(name for name in names_of(repo) if name != "main"), "main"]
    end = next(c for c in found if c.label == "stage1-step928646-tokens3896B")
    assert (end.stage, end.step, end.tokens) == ("stage1", 928_646, 928_646 * 4_194_304)
    assert end.learning_rate == pytest.approx(6.1358e-5, rel=1e-3)
    assert (end.family, end.files, end.suspect) == ("olmo2-7b", (), ())
    assert end.ref == Ref(repo, "stage1-step928646-tokens3896B")
    assert len(end.commit) == 40
    last = found[-2]
    assert (last.stage, last.ingredient, last.step) == ("stage2", 3, 11_931)

    equal = [c for c in found if c.suspect]
    assert [c.step for c in equal] == [98_000, 101_000, 175_000, 300_000]
    assert names_in_equal_report(equal[0].suspect[0]) == tuple(labels(equal))
    assert "https://github.com/allenai/OLMo/issues/915" in equal[0].suspect[0]

    twice = place.find("allenai/OLMo-2-1124-13B")
    assert not any(c.suspect for c in twice)  # two names for one place are no contradiction
    noted = [c.label for c in twice if any(map(names_in_equal_report, c.notes))]
    assert len(noted) == 6
    assert all("ingredient" in label for label in noted)

    bad = [c for c in place.find("EleutherAI/pythia-12b") if c.suspect]
    assert [c.step for c in bad if "first shard" in c.suspect[0]] == [50_000, 58_000]
    assert {0, 1} < {c.step for c in bad}


def test_tags_are_revisions_too_and_what_the_hub_makes_by_itself_is_none(place):
    place.write("o/run", {f"global_step{n}": WEIGHTS for n in (100, 20)}, branch_per_revision=False)
    repo = place.hub.repos["o/run"]
    repo.branches["refs/convert/parquet"] = repo.tags["global_step20"]
    found = place.find("o/run")
    assert labels(found) == ["global_step20", "global_step100", "main"]
    assert found[1].commit == found[2].commit  # kept, and seen to be the same


def test_a_recipe_s_family_and_schedule_are_heeded(place):
    place.write("o/run", {f"stage2-ingredient2-step{n}": WEIGHTS for n in (250, 500)})
    listing = place.listing()
    linear = {"schedule": {"kind": "linear", "peak": 1.0, "end": 1000}}
    for more, family, rate in (({"family": "demo"}, "demo", 0.00225), (linear, None, 0.75)):
        known = find_series(listing, "o/run", Recipe(("x",), (), **more))[0]
        assert (known.family, known.learning_rate) == (family, pytest.approx(rate))


def test_one_revision_is_a_series_of_one_and_gives_its_name_to_its_commit(place):
    place.write("o/run", {f"step{n}": weights(str(n)) for n in (1, 2)})
    repo, listing = place.hub.repos["o/run"], place.listing()
    commit = repo.branches["step1"]
    for target in ("o/run@step1", "hf://o/run@step1", f"o/run@{commit}"):
        (found,) = find_series(listing, target, RECIPE)
        assert (found.label, found.step, found.commit) == ("step1", 1, commit)
    assert calls(place.hub) == ["o/run/refs"]
    first = next(iter(repo.commits))  # no name leads there
    (nameless,) = place.find(f"o/run@{first}")
    assert (nameless.label, nameless.commit) == (first[:12], first)


def test_a_folder_that_was_meant_is_thought_of(place, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError) as caught:
        place.find("runs/step1")
    assert caught.value.message.startswith("there is no folder `runs/step1`, and on the Hub: ")
    (tmp_path / "runs" / "step10").mkdir()
    with pytest.raises(UsageError) as mistyped:  # before the Hub is asked
        place.find("runs/step1")
    assert mistyped.value.hint == "did you mean `step10`? Of the Hub, write it as `hf://runs/step1`"
    with pytest.raises(HubError) as caught:
        place.find("elsewhere/step1")
    assert "folder" not in caught.value.hint


def below(folders):
    return {f"{folder}/{n}": c for folder, found in folders.items() for n, c in found.items()}


def test_numbered_folders_beneath_a_model_come_before_it_or_lie_deeper(place):
    parts = below({f: weights(f) for f in ("checkpoint-1000", "checkpoint-500", "onnx")})
    place.write("o/run", {"main": weights("end") | parts})
    deep = {f"iter_{step}/mp_rank_00": weights(step) for step in ("0002384", "0000300")}
    place.write("o/deep", {"main": below(deep)})
    hub, listing = place.hub, place.listing()
    found = find_series(listing, "o/run", RECIPE)
    assert labels(found) == ["checkpoint-500", "checkpoint-1000", "run"]
    assert [str(c.ref) for c in found] == [
        "o/run@main//checkpoint-500", "o/run@main//checkpoint-1000", "o/run@main",
    ]  # fmt: skip
    read = with_files(listing, found)
    assert labels(read) == labels(found)
    assert len({c.content for c in read}) == 3
    assert labels(with_files(listing, found[2:])) == ["run"]
    assert [path.split("/")[2] for path in calls(hub)] == ["refs", "tree"]
    deeper = place.read("o/deep")
    assert [(c.label, c.step) for c in deeper] == [("iter_0000300", 300), ("iter_0002384", 2384)]
    assert deeper[0].ref.subfolder == "iter_0000300/mp_rank_00"
    assert [files(c) for c in deeper] == [["model.safetensors"]] * 2


def test_folders_of_a_numbered_revision_are_found_when_its_tree_is_read(place):
    parts = below({"b2": weights("b"), "a1": weights("a")})
    place.write("o/run", {"step1": weights("1"), "step2": parts})
    hub, listing = place.hub, place.listing()
    found = find_series(listing, "o/run@step2", RECIPE)
    assert calls(hub) == ["o/run/refs"]
    assert labels(with_files(listing, found)) == ["a1", "b2"]
    both = with_files(listing, find_series(listing, "o/run", RECIPE))
    assert labels(both) == ["step1", "step2/a1", "step2/b2", "main/a1", "main/b2"]


def test_a_folder_can_be_asked_for(place):
    place.write("o/run", {"main": weights("end") | below({"checkpoint-500": weights("a")})})
    for target in ("o/run//checkpoint-500", "o/run@main//checkpoint-500/"):
        (found,) = place.read(target)
        assert (found.label, found.step, files(found)) == (
            "checkpoint-500", 500, ["model.safetensors"],
        )  # fmt: skip
    with pytest.raises(HubError, match="no folder `checkpoint-50`") as caught:
        place.read("o/run//checkpoint-50")
    assert caught.value.hint == "did you mean `checkpoint-500`?"


def test_one_repository_for_each_checkpoint_is_a_series(place):
    step = "TinyLlama-1.1B-intermediate-step"
    names = [f"{step}-1431k-3T", f"{step}-480k-1T", f"{step}-50K-105b", "TinyLlama-1.1B-Chat-v1.0"]
    for name in names:
        place.write(f"TinyLlama/{name}", {"main": weights(name)})
    place.write("Other/TinyLlama-1.1B-intermediate-step-1k-1T", {"main": WEIGHTS})
    hub, listing = place.hub, place.listing()
    found = find_series(listing, "TinyLlama/TinyLlama-1.1B-*", RECIPE)
    assert labels(found)[:2] == [f"{step}-480k-1T", f"{step}-1431k-3T"]
    assert [(c.step, c.tokens) for c in found[:2]] == [(480_000, 10**12), (1_431_000, 3 * 10**12)]
    assert set(labels(found)) == set(names)
    assert len(calls(hub)) <= 1 + 2 * len(names)
    pair = [f"TinyLlama/{step}-1431k-3T", f"TinyLlama/{step}-480k-1T"]
    assert labels(find_all(pair, RECIPE, lambda: listing)) == labels(found)[:2]


def test_equal_names_are_told_apart_by_their_repositories(place):
    for repo in ("o/a", "p/a", "o/b"):
        place.write(repo, {"step1": weights(repo)})
    listing = place.listing()
    found = find_all(["o/a", "p/a", "o/b@step1"], RECIPE, lambda: listing)
    assert labels(found) == ["o/a/step1", "o/a/main", "p/a/step1", "p/a/main", "b/step1"]


def test_folders_and_repositories_stand_side_by_side(place, tmp_path):
    place.write("o/run", {"step3": weights("3")}, main="step3")
    (tmp_path / "step20").mkdir()
    (tmp_path / "step20" / "config.json").write_text("{}")
    listing = place.listing()
    found = find_all([str(tmp_path / "step20"), "o/run@step3"], RECIPE, lambda: listing)
    assert labels(found) == ["step3", "step20"]
    assert [c.commit is None for c in found] == [False, True]
    assert with_files(listing, found)[1] == found[1]

    def refuse():
        raise AssertionError

    assert labels(find_all([str(tmp_path / "step20")], RECIPE, refuse)) == ["step20"]


OUTSIDE = json.dumps({"weight_map": {"a": "../../x.safetensors", "b": "a.safetensors"}})
HOLEY = {name: data for name, data in sharded("a", 3).items() if "00002" not in name}
WHAT_IS_READ = [
    # what is there                                            what is read, and the doubt
    (weights("a"), ["model.safetensors"], ""),
    (sharded("a", 3) | weights("p", "pytorch_model.bin"), shards(3), ""),
    (weights("p", "pytorch_model.bin", "training_args.bin"), ["pytorch_model.bin"], ""),
    (sharded("a") | weights("old"), ["model.safetensors"],
     "`model.safetensors` is read, as transformers does, and "
     "`model-00001-of-00002.safetensors` and 1 more, which"),
    # shards of an earlier upload, and one that is missing
    (weights("s", "model-00001-of-00003.safetensors") | sharded("a"), shards(2), ""),
    (HOLEY, [], "`model-00002-of-00003.safetensors` of `model.safe"),
    (weights("a", "a.safetensors") | {INDEX: OUTSIDE}, [], "is missing"),
    (weights("a", "consolidated.00.pth"), [], "it has `consolidated.00.pth`"),
    *(({INDEX: text}, [], "is not an index of weights")
      for text in ("", "[]", "{}", "not JSON", '{"weight_map": 3}', "[" * 9000)),
]  # fmt: skip


def test_the_weights_that_transformers_reads_are_chosen(place):
    for number, (stored, _, _) in enumerate(WHAT_IS_READ):
        place.write(f"o{number}/run", {"main": {"README.md": "# run", **stored}})
    for number, (_, names, doubt) in enumerate(WHAT_IS_READ):
        (found,) = place.read(f"o{number}/run")
        assert (found.label, found.ref) == ("run", Ref(f"o{number}/run", "main"))
        assert files(found) == names
        assert doubt in " ".join(found.suspect)
        assert bool(doubt) == bool(found.suspect)
        assert found.requires == (("pickle",) if names == ["pytorch_model.bin"] else ())
        assert all(len(file.sha256) == 64 for file in found.files)


def test_a_readme_alone_and_what_a_family_needs_is_said(place):
    place.write("o/run", {f"step{n}": weights(str(n)) for n in (1, 2)}, main=None)
    place.write("LLM360/Amber", {"ckpt_001": weights("a", "pytorch_model.bin")})
    repo = "open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096"
    place.write(repo, {"iter_0002000": weights("b")})
    found = place.read("o/run")
    assert labels(found) == ["step1", "step2", "main"]
    assert (found[-1].files, found[-1].suspect) == ((), (NO_WEIGHTS,))
    amber = place.read("LLM360/Amber")[0]
    assert (amber.requires, amber.step) == (("pickle",), 2 * 762)
    assert place.read(repo)[0].requires == ("remote_code",)


def test_each_tree_is_one_call_and_then_none(place):
    place.write("o/run", {f"step{n}": weights(str(n)) for n in range(9)}, main="step8")
    hub, listing = place.hub, place.listing()
    found = find_series(listing, "o/run", RECIPE)
    some = with_files(listing, [*found[:3], *found[-2:]])  # main and step8 are one commit
    assert [path.split("/")[2] for path in calls(hub)] == ["refs", *["tree"] * 4]
    with_files(listing, some)
    assert len(calls(hub)) == 5
    again = place.listing()  # another process
    known = with_files(again, find_series(again, "o/run", RECIPE), known_only=True)
    assert len(calls(hub)) == 6
    assert [bool(c.files) for c in known] == [True] * 3 + [False] * 5 + [True] * 2


def test_what_names_leave_open_is_not_asked_for_where_nothing_may_be(place):
    stale = weights("s", "model-00001-of-00003.safetensors")
    place.write("o/run", {"step1": stale | sharded("a", 2)})
    hub, listing = place.hub, place.listing()
    found = find_series(listing, "o/run@step1", RECIPE)
    listing.files("o/run", str(found[0].commit))
    before = len(hub.log)
    (known,) = with_files(listing, found, known_only=True)
    assert (known.files, known.suspect, len(hub.log)) == ((), (), before)
