"""Rollouts by a server that speaks OpenAI's completions, such as vLLM's, SGLang's or llama.cpp's.

Prompts go there as token ids; text comes back. Ids are those of the text, which has to be the text
of these ids again, and as many as the server counted: else they may not be what was generated.
A key is sent to the named host alone, and is neither printed nor stored.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from qaudit.core.foreign import json_of
from qaudit.errors import MachineError, UsageError
from qaudit.rollouts.samples import DrawSettings, DueSample
from qaudit.text.rollouts import Rollout

KEY = "QAUDIT_SERVER_KEY"
"""The variable with the key that a server wants."""
_MOST_NBYTES = 1 << 26
_SECONDS = 1800.0
_NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings that change no probability, in place of what a checkpoint or a server has."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses to follow: the key would go along."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(frozen=True)
class Server:
    """A server, by the address in front of `/completions`, and the model's name there."""

    url: str
    model: str

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname or address.username:
            raise UsageError(
                f"`--server {address.scheme}://{address.hostname or ''}` is no address of a server",
                hint="write it as `--server http://127.0.0.1:8000/v1`; a key goes into " + KEY,
            )

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the one choice of an answer, with the number of its tokens."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        body = json.dumps({"model": self.model, "n": 1, **request}).encode()
        url = f"{self.url.rstrip('/')}/completions"
        posted = urllib.request.Request(url, body, headers, method="POST")
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(posted, timeout=_SECONDS) as answer:
                document = json_of(answer.read(_MOST_NBYTES).decode())
            choice = document["choices"][0]
            return {
                "text": str(choice["text"]),
                "finished": choice.get("finish_reason") == "stop",
                "tokens": (document.get("usage") or {}).get("completion_tokens"),
            }
        except urllib.error.HTTPError as error:
            raise self._failure(f"answers with {error.code}") from error
        except (OSError, ValueError) as error:
            raise self._failure(f"does not answer: {getattr(error, 'reason', error)}") from error
        except (LookupError, TypeError, AttributeError) as error:
            raise self._failure("answers with something else than a completion") from error

    def _failure(self, what: str) -> MachineError:
        return MachineError(
            f"the server `{urlsplit(self.url).netloc}` {what}",
            hint=f"check `--server`, `--served-model` and {KEY}, then run the same command again",
        )


def complete(
    server: Server, rows: Sequence[DueSample], drawings: Sequence[DrawSettings], tokenizer: Any
) -> list[Rollout]:
    """Return rollouts of a server, whose requests are sent at once."""
    requests = [_request(row, drawing) for row, drawing in zip(rows, drawings, strict=True)]
    pool = ThreadPoolExecutor(len(rows))
    try:
        answers = [*pool.map(server.complete, requests)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [
        _rollout(row, drawing.end_ids, answer, tokenizer)
        for row, drawing, answer in zip(rows, drawings, answers, strict=True)
    ]


def _request(row: DueSample, drawing: DrawSettings) -> dict[str, Any]:
    """Return a request with every setting of the sampler: servers have defaults of their own."""
    sampler = drawing.sampler
    return {
        "prompt": list(row.prompt.ids),
        "max_tokens": drawing.max_tokens,
        "seed": row.seed(drawing.seed) % 2**31,
        "temperature": 0.0 if row.greedy else sampler.temperature,
        "top_p": 1.0 if row.greedy else sampler.top_p,
        "top_k": -1 if row.greedy else sampler.top_k or -1,
        **_NEUTRAL,
    }


def _rollout(
    row: DueSample, end_ids: Sequence[int], answer: Mapping[str, Any], tokenizer: Any
) -> Rollout:
    """Return a server's answer as ids, or refuse a text that is not its tokens."""
    text, finished = answer["text"], answer["finished"]
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    again = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    counts = {None, len(ids), len(ids) + finished}
    if again != text or answer["tokens"] not in counts:
        raise UsageError(
            f"the answer of the server to prompt {row.prompt.number} does not tokenize back to "
            f"what was generated: {len(ids)} tokens here, {answer['tokens'] or 'unknown'} there",
            hint="generate here, without `--server`: its ids are kept as they are",
        )
    if finished and end_ids:
        ids.append(end_ids[0])
    if not ids:
        raise UsageError(
            f"the server wrote nothing behind prompt {row.prompt.number}",
            hint="leave the prompt out, or generate here, without `--server`",
        )
    return row.rollout(ids, finished=finished)
