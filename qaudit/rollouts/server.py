"""Rollouts by a server that speaks OpenAI's completions, such as vLLM's, SGLang's or llama.cpp's.

Prompts go there as token ids. Where text comes back and no ids (vLLM returns them on request), ids
are those of the text, which has to be the text of these ids again, and as many as the server
counted: else they may not be what was generated.
A server that refuses ids is sent text, if that is the same ids again and as many as it counted; one
that refuses settings of the sampler is sent a configuration, as `transformers serve` reads it.
A key is sent to the named host alone, and is neither printed nor stored.
"""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from qaudit.errors import MachineError, UsageError
from qaudit.report.format import printable
from qaudit.rollouts.folder import DrawSettings, DueSample, Prompt
from qaudit.support.foreign import json_of
from qaudit.text.rollouts import Rollout

KEY = "QAUDIT_SERVER_KEY"
"""The variable with the key that a server wants."""
_NBYTES, _NBYTES_OF_TOKEN = 1 << 16, 1 << 9
"""Of an answer: beside its tokens, and of each one that was sent or asked for."""
_MOST_REASON = 1 << 12
_SECONDS = 1800.0  # until anything arrives
_REFUSED = (400, 404, 422)
_MESSAGE = re.compile(r'"(?:detail|error|message|msg)"\s*:\s*"((?:[^"\\]|\\.)+)"')
_GENERATE_HERE = "generate here, without `--server`"
_NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings that change no probability, in place of what a checkpoint or a server has."""


class _RefusedError(MachineError):
    """A server that refuses a request, and may take another form of it."""


@dataclass(frozen=True)
class Server:
    """A server, by the address in front of `/completions`, and the model's name there."""

    url: str
    model: str

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        usable = False
        with suppress(ValueError):  # a port beyond 65535
            usable = address.port != 0 and self.url.isascii() and self.url.isprintable()
        if (
            not usable
            or address.scheme not in ("http", "https")
            or not address.hostname
            or address.username
        ):
            raise UsageError(
                f"`--server {address.scheme}://{address.hostname or ''}` is no address of a server",
                hint="write it as `--server http://127.0.0.1:8000/v1`; a key goes into " + KEY,
            )

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the one choice of an answer, with the number of its tokens."""
        address, key = urlsplit(self.url), os.environ.get(KEY)
        if key and not re.fullmatch(r"[!-~]+", key):  # an error about headers would print it
            raise UsageError(
                f"the key in {KEY} holds characters that no key has",
                hint="look for a line break or a quote in it",
            )
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        body = json.dumps({"model": self.model, **request}).encode()
        most = _NBYTES + _NBYTES_OF_TOKEN * (len(request["prompt"]) + request["max_tokens"])
        is_open = address.scheme == "http"
        kind = http.client.HTTPConnection if is_open else http.client.HTTPSConnection
        connection = kind(str(address.hostname), address.port, timeout=_SECONDS)
        try:
            connection.request("POST", f"{address.path.rstrip('/')}/completions", body, headers)
            answer = connection.getresponse()  # redirects are not followed: the key would be
            if not 200 <= answer.status < 300:
                what, reason = f"answers with {answer.status}", _reason(answer, key)
                raise self._failure(
                    f"{what}: {reason}" if reason else what,
                    _RefusedError if answer.status in _REFUSED else MachineError,
                )
            read = answer.read(most + 1)
            if len(read) > most:
                tokens = request["max_tokens"]
                raise self._failure(f"answers with more than {most} bytes for {tokens} tokens")
            return _choice(json_of(read.decode()))
        except (UnicodeEncodeError, UnicodeDecodeError) as error:
            raise self._failure(f"does not answer: {error.reason}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = " ".join((str(error) or type(error).__name__).split())
            raise self._failure(f"does not answer: {printable(reason)[:200]}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise self._failure("answers with something else than a completion") from error
        finally:
            connection.close()

    def _failure(self, what: str, kind: type[MachineError] = MachineError) -> MachineError:
        return kind(
            f"the server `{urlsplit(self.url).netloc}` {what}",
            hint=f"check `--server`, `--set served_model=NAME` and {KEY}, then "
            "run the same command again",
        )


def _choice(document: Any) -> dict[str, Any]:
    """Return what is read of an answer, each of its type: TypeError for any other."""
    choice, usage = document["choices"][0], document.get("usage") or {}
    text, ids = choice["text"], choice.get("token_ids")
    counts = usage.get("completion_tokens"), usage.get("prompt_tokens")
    if not isinstance(text, str) or not isinstance(ids, list | None):
        raise TypeError
    if any(type(count) not in (int, type(None)) for count in counts):
        raise TypeError
    text.encode()  # ValueError for half a character
    return {
        "text": text,
        "finished": choice.get("finish_reason") == "stop",
        "tokens": counts[0],
        "prompt_tokens": counts[1],
        "ids": ids,
    }


def _reason(answer: http.client.HTTPResponse, key: str | None) -> str:
    """Return what a server says of a refusal, without the key."""
    try:
        text = answer.read(_MOST_REASON).decode()
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    message = _MESSAGE.search(text)
    text = " ".join((message[1] if message else text).split())
    return printable(text.replace(key, "...") if key else text)[:200]


class ServerClient:
    """Rollouts of a server, whose requests are sent at once."""

    def __init__(self, server: Server, tokenizer: Any) -> None:
        self._server, self._tokenizer = server, tokenizer
        self._form = 0  # the first that the server has not refused

    def complete(
        self, rows: Sequence[DueSample], drawings: Sequence[DrawSettings]
    ) -> list[Rollout]:
        pool = ThreadPoolExecutor(len(rows))
        try:
            answers = [*pool.map(self._answer, rows, drawings)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [*map(self._rollout, rows, drawings, answers)]

    def _answer(self, row: DueSample, drawing: DrawSettings) -> dict[str, Any]:
        """Return the answer to the first form of a request that is not refused.

        Forms are: with ids, with text, and with text and a configuration.
        """
        form = self._form
        prompt = self._text_of(row.prompt) if form else list(row.prompt.ids)
        settings = _settings(row, drawing, is_configuration=form == 2)
        try:
            answer = self._server.complete({"prompt": prompt, **settings})
        except _RefusedError:
            if form == 2:
                raise
            # Requests are sent at once: another may have moved on already.
            self._form = max(self._form, form + 1)
            return self._answer(row, drawing)
        if answer["prompt_tokens"] not in (None, len(row.prompt.ids)):
            raise UsageError(
                f"the server reads prompt {row.prompt.number} as {answer['prompt_tokens']} "
                f"tokens, and it has {len(row.prompt.ids)}",
                hint=_GENERATE_HERE,
            )
        return answer

    def _text_of(self, prompt: Prompt) -> str:
        """Return text that a server makes the same ids of; it writes the first token itself."""
        begin = getattr(self._tokenizer, "bos_token", None) or ""
        for text in (prompt.text, prompt.text.removeprefix(begin)):
            if tuple(self._tokenizer(text, verbose=False)["input_ids"]) == prompt.ids:
                return text
        raise UsageError(
            f"the server reads prompts as text alone, and prompt {prompt.number} would be other "
            "tokens",
            hint=_GENERATE_HERE,
        )

    def _rollout(self, row: DueSample, drawing: DrawSettings, answer: dict[str, Any]) -> Rollout:
        """Return a server's answer as ids, and end it where the server says that it ended."""
        finished, ids, tokenizer = answer["finished"], answer["ids"], self._tokenizer
        number, end_ids, hint = row.prompt.number, drawing.end_ids, _GENERATE_HERE
        problem = ""
        if ids is None:
            text, count = answer["text"], answer["tokens"]
            ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            again = tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if again != text or count not in {None, len(ids), len(ids) + finished}:
                problem = (
                    f"the answer of the server to prompt {number} does not tokenize back to "
                    f"what was generated: {len(ids)} tokens here, {count or 'unknown'} there"
                )
                hint = f"{_GENERATE_HERE}: its ids are kept as they are"
        elif not all(type(token) is int and 0 <= token < len(tokenizer) for token in ids):
            problem = f"the ids of the server behind prompt {number} are not of this tokenizer"
            hint = "serve the checkpoint that is named here"
        if not problem and len(ids) > drawing.max_tokens:
            problem = (
                f"the server wrote {len(ids)} tokens behind prompt {number}, and "
                f"{drawing.max_tokens} were asked for"
            )
        if finished and end_ids and (not ids or ids[-1] not in end_ids):
            ids.append(end_ids[0])
        if not problem and not ids:
            problem = f"the server wrote nothing behind prompt {number}"
            hint = f"leave the prompt out, or {_GENERATE_HERE}"
        if problem:
            raise UsageError(problem, hint=hint)
        return row.rollout(ids, finished=finished)


def _settings(row: DueSample, drawing: DrawSettings, *, is_configuration: bool) -> dict[str, Any]:
    """Return the settings of a request; `transformers serve` reads some in a configuration."""
    sampler, greedy, end_ids = drawing.sampler, row.greedy, drawing.end_ids
    settings = {
        "max_tokens": drawing.max_tokens,
        "seed": row.seed(drawing.seed) % 2**31,
        "temperature": 0.0 if greedy else sampler.temperature,
    }
    if not is_configuration:
        return {
            "n": 1,
            **settings,
            "top_p": 1.0 if greedy else sampler.top_p,
            "top_k": -1 if greedy else sampler.top_k or -1,
            **_NEUTRAL,
            "return_token_ids": True,
        }
    drawn = {
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
        "top_k": sampler.top_k or 0,
    }
    configuration = {
        "do_sample": not greedy,
        "eos_token_id": list(end_ids) or None,
        "pad_token_id": end_ids[0] if end_ids else 0,
        **({} if greedy else drawn),
    }
    return {**settings, "generation_config": json.dumps(configuration)}
