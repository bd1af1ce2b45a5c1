"""Rollouts of a server: its text has to be its tokens, and its key goes nowhere else."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from qaudit.errors import UsageError
from qaudit.rollouts.folder import DrawSettings, DueSample, Prompt
from qaudit.rollouts.server import Server, ServerClient
from qaudit.text.rollouts import Sampler, read_rollouts
from tests.support.cli import refused
from tests.support.models import save_model, save_tokenizer

KEY = "key-that-no-log-has"
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any] | bytes]]


class Served(SimpleNamespace):
    """A server that answers as a test says, and keeps what it was sent."""


def completion(text, tokens=None, reason="length"):
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return {"choices": [{"text": text, "finish_reason": reason}], **usage}


@pytest.fixture
def served():
    state = Served(
        requests=[], keys=[], url="",
        answer=lambda _: (200, completion(" a lazy dog")),
        raw=b"",  # sent as it is, in place of an answer
    )  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.requests.append({"path": self.path, **json.loads(body)})
            state.keys.append(self.headers.get("Authorization"))
            if state.raw:
                self.wfile.write(state.raw)
                return
            code, content = state.answer(state.requests[-1])
            self.send_response(code)
            if code == 302:
                self.send_header("Location", f"{state.url}/elsewhere")
            self.end_headers()
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.wfile.write(raw)

        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    save_tokenizer(save_model(folder, 1, eos_token_id=270))
    return folder


@pytest.fixture
def place(model, tmp_path, monkeypatch):
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the quick fox"}', "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QAUDIT_SERVER_KEY", KEY)
    return tmp_path


@pytest.fixture
def write(place, qaudit, served):
    def run(*options):
        how = ("--server", served.url, "--set", "served_model=small", "--max-tokens", 9, *options)
        files = ("--prompts", "prompts.jsonl", "--out", "out", "--samples", 1)
        ended = qaudit("rollouts", "model", *files, *how)
        stored = b"".join(path.read_bytes() for path in place.rglob("out/*") if path.is_file())
        assert KEY not in ended.out + ended.err + stored.decode()
        return ended

    return run


def test_text_becomes_the_ids_that_the_server_counted(write, served, place):
    tokenizer = AutoTokenizer.from_pretrained("model")
    ids = tokenizer(" a lazy dog", add_special_tokens=False)["input_ids"]
    served.answer = lambda _: (200, completion(" a lazy dog", len(ids) + 1, "stop"))
    assert write("--temperature", 0.7, "--set", "top_k=20").code == 0
    rollouts = read_rollouts(place / "out")
    assert [list(r.new_ids) for r in rollouts.samples] == [[*ids, 270]] * 2
    assert all(r.finished for r in rollouts.samples)
    greedy, sampled = sorted(served.requests, key=lambda request: request["temperature"])
    assert (greedy["path"], greedy["model"]) == ("/v1/completions", "small")
    assert greedy["temperature"] == 0
    assert greedy["prompt"] == list(rollouts.samples[0].ids)
    assert (sampled["temperature"], sampled["top_k"], sampled["max_tokens"]) == (0.7, 20, 9)
    assert (greedy["top_k"], greedy["top_p"], sampled["repetition_penalty"]) == (-1, 1, 1)
    assert served.keys == [f"Bearer {KEY}"] * 2
    assert rollouts.header.engine == "a server"


def test_requests_are_sent_at_once_and_ids_that_a_server_returns_are_kept_as_they_are(
    write, served, place
):
    """Text of several ids may tokenize to others, and special tokens are left out of it."""
    both = threading.Barrier(2, timeout=60)
    answered = completion("other text", 3, "stop")
    answered["choices"][0]["token_ids"] = [9, 7, 270]

    def answer(_):
        both.wait()  # breaks unless the other request is there before this one is answered
        return 200, answered

    served.answer = answer
    assert write().code == 0
    assert [list(r.new_ids) for r in read_rollouts(place / "out").samples] == [[9, 7, 270]] * 2
    assert all(request["return_token_ids"] is True for request in served.requests)


def test_tokens_that_are_not_those_of_its_text_or_of_the_request_are_refused(write, served):
    asked = "wrote 400 tokens behind prompt 0, and 9 were asked for"
    for ids, prompt, sentence, hint in (
        (None, None, "does not tokenize back to what was generated", "without `--server`"),
        *((ids, None, "are not of this tokenizer", "serve the checkpoint")
          for ids in ([10**6], [-1], ["9"], [True])),
        ([9] * 400, None, asked, "generate here"),
        ([9] * 400, 1, "the server reads prompt 0 as 1 tokens", "generate here"),
    ):  # fmt: skip
        answer = completion(" a lazy dog", 99 if ids is None else None, "stop")
        if ids is not None:
            answer["choices"][0]["token_ids"] = ids
        if prompt is not None:
            answer["usage"] = {"prompt_tokens": prompt}
        served.answer = lambda _, answer=answer: (200, answer)  # type: ignore[misc]
        refused(write(), 2, sentence, hint)
    served.answer = lambda _: (200, completion("", 0, "stop"))
    assert write().code == 0


def of_text_alone(tokens):
    """Answer as mlx_lm.server does: prompts are text, and its error is a text."""

    def answer(request):
        if isinstance(request["prompt"], list):
            return 404, {"error": "text input must be of type `str`"}
        answer = completion(" a lazy dog")
        answer["usage"] = {"prompt_tokens": tokens}
        return 200, answer

    return answer


def test_a_server_that_reads_text_alone_is_sent_text(write, served, place):
    tokens = len(AutoTokenizer.from_pretrained("model")("the quick fox")["input_ids"])
    served.answer = of_text_alone(tokens)
    assert write("--temperature", 0.7, "--set", "top_k=20").code == 0
    assert [r["prompt"] for r in served.requests if r["prompt"] == "the quick fox"]
    assert all(r["top_k"] in (-1, 20) for r in served.requests)
    assert len(read_rollouts(place / "out").samples) == 2
    served.answer = of_text_alone(tokens + 1)
    sentence = f"the server reads prompt 0 as {tokens + 1} tokens, and it has {tokens}"
    refused(write("--set", "seed=1", "--out", "again"), 2, sentence, "without `--server`")


def test_a_server_that_refuses_settings_is_sent_a_configuration(write, served, place):
    """As `transformers serve`, which refuses what OpenAI's requests do not have."""

    def answer(request):
        if isinstance(request["prompt"], list):
            return 400, {"detail": "prompt must be a string."}
        if "top_k" in request or "min_p" in request:
            return 422, {"detail": "Unexpected fields in the request: {'top_k'}"}
        return 200, completion(" a lazy dog")

    served.answer = answer
    assert write("--temperature", 0.7, "--set", "top_k=20", "--set", "top_p=0.9").code == 0
    settings = [json.loads(r["generation_config"]) for r in served.requests if len(r) == 7]
    greedy, sampled = sorted(settings, key=lambda values: values["do_sample"])
    assert greedy == {"do_sample": False, "eos_token_id": [270], "pad_token_id": 270}
    drawn = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    assert sampled == {**greedy, **drawn}


class Beginning:
    """A tokenizer whose tokens are characters, behind a first token."""

    bos_token = "<s>"

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [ord(character) for character in text.replace("<s>", "\1")]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def test_the_first_token_is_left_to_a_server_that_reads_text(served):
    """A template writes it, and so does the server."""
    served.answer = of_text_alone(3)
    client = ServerClient(Server(served.url, "small"), Beginning())
    settings = DrawSettings(Sampler(), 0, 99, ())
    due = DueSample(Prompt(0, "a", (1, 104, 105), "<s>hi"), 0, greedy=True)
    (rollout,) = client.complete([due], [settings])
    assert "".join(map(chr, rollout.new_ids)) == " a lazy dog"
    assert served.requests[-1]["prompt"] == "hi"
    without = DueSample(Prompt(0, "a", (104, 105), "hi"), 0, greedy=True)
    with pytest.raises(UsageError, match="reads prompts as text alone") as refusal:
        client.complete([without], [settings])
    assert "without `--server`" in refusal.value.hint


def test_answers_of_anything_else_or_without_an_end_end_in_a_sentence(write, served):
    for code, content, sentence in (
        (401, b"no", "answers with 401"),
        (302, b"", "answers with 302"),
        (200, b"<html>", "does not answer"),
        (200, b"{}", "something else than a completion"),
        (200, b"[]", "something else than a completion"),
        (200, b'{"choices": [{}]}', "something else than a completion"),
        (200, b'{"choices": [{"text": null}]}', "something else than a completion"),
        (200, b'{"choices": [{"text": "a", "token_ids": {}}]}', "something else than a completion"),
        (200, b'{"choices": [{"text": "a", "token_ids": "9"}]}', "something else than a"),
        (200, b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "4"}}', "something else"),
        (200, b'{"choices": [{"text": "\\ud800"}]}', "does not answer: surrogates not allowed"),
        (200, b'{"choices": [' + b" " * 2**18, "answers with more than"),
    ):
        served.answer = lambda _, code=code, content=content: (code, content)  # type: ignore[misc]
        refused(write(), 4, sentence, "QAUDIT_SERVER_KEY")
    assert all(request["path"] == "/v1/completions" for request in served.requests)
    for message, said in (
        ({"error": {"message": f"no model `small`\n for {KEY}"}}, "400: no model `small`"),
        (b"\xff", "400"),
    ):
        served.answer = lambda _, message=message: (400, message)  # type: ignore[misc]
        refused(write(), 4, f"answers with {said}", "`--set served_model=NAME`")
    for raw, sentence in (
        (b"ICY 200 fine\r\n\r\n", "does not answer: "),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "does not answer: "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", "answers with something"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200, "does not answer: "),
        (b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "answers with 500"),
    ):
        served.raw = raw  # which is no HTTP, or broken
        refused(write(), 4, sentence, "QAUDIT_SERVER_KEY")


def test_a_key_that_no_header_holds_and_an_address_with_a_key_in_it_are_refused(
    write, served, qaudit, monkeypatch
):
    files = ("--prompts", "prompts.jsonl", "--out", "out")
    for url in (f"http://me:{KEY}@127.0.0.1/v1", "file:///etc/passwd", "127.0.0.1:8000",
                "http://127.0.0.1:99999", "http://127.0.0.1/v1\tx"):  # fmt: skip
        ended = qaudit("rollouts", "model", *files, "--server", url)
        refused(ended, 2, "is no address of a server", "QAUDIT_SERVER_KEY")
        assert KEY not in ended.err
    monkeypatch.setenv("QAUDIT_SERVER_KEY", f"{KEY}\n")
    refused(write(), 2, "holds characters that no key has", "line break")
    assert not served.requests
