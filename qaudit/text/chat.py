"""Conversations -> documents: rendered by the model's chat template, with the spans it wrote.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}

The template is that of the checkpoint, or a file; it is rendered in the sandbox of all templates,
and tokens are those of `apply_chat_template` in transformers. What the model wrote is what the
template holds between `{% generation %}` and `{% endgeneration %}`. Without these it is what
rendering the messages up to an answer leaves out. Where such a prefix does not begin the whole, in
text and in tokens (templates drop the reasoning of earlier turns), the last answer alone is scored.

Reasoning and calls are separated from answers by markers that the template itself contains.

Chat templates: where a checkpoint has them, what they may name, and their markers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from qaudit.errors import CorpusError, UsageError
from qaudit.sandbox import TemplateError, Templates
from qaudit.text.rollouts import TokenMarker
from qaudit.text.tokenizer import Tokenizer, must_be_unicode
from qaudit.types import ANSWER, CALL, PROMPT, REASONING, Document, RoleSpan
from qaudit.whole import read_regular, read_table

OTHER_TEMPLATE = "give another template with `--set chat_template=FILE`"
_TEMPLATE, _SETTINGS, _SPECIAL = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_LARGEST_TEMPLATE_NBYTES = 1 << 20
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

Marker = tuple[str, str, str]
"""A role, what begins it, and what ends it; '' ends with the answer."""

MARKERS: tuple[Marker, ...] = (
    (REASONING, "<think>", "</think>"),
    (REASONING, "<thinking>", "</thinking>"),
    (REASONING, "[THINK]", "[/THINK]"),
    (REASONING, "<seed:think>", "</seed:think>"),
    (REASONING, "<|START_THINKING|>", "<|END_THINKING|>"),
    (REASONING, "<|channel|>analysis<|message|>", "<|end|>"),
    (CALL, "<tool_call>", "</tool_call>"),
    (CALL, "<|tool_call_start|>", "<|tool_call_end|>"),
    (CALL, "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    (CALL, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    (CALL, "<|START_ACTION|>", "<|END_ACTION|>"),
    (CALL, "[TOOL_CALLS]", ""),
    (CALL, "<|python_tag|>", ""),
)
"""Of the templates of models; those that a template does not contain mean nothing in its text."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and where it is from."""

    name: str
    text: str
    with_tools: str = ""  # the template of conversations with tools, where that is another
    tokens: Mapping[str, str] = field(default_factory=dict)  # as `eos_token`


def template_in_file(file: str, folders: Sequence[Path]) -> ChatTemplate:
    text = _text(Path(file), "name a Jinja file: `--set chat_template=FILE`")
    return ChatTemplate(file, text, tokens=_special_tokens(folders))


def template_of(folders: Sequence[Path]) -> ChatTemplate:
    """Return the template of the first folder that has one."""
    for folder in folders:
        named = named_templates(folder)
        if "default" in named:
            text, tools = named["default"], named.get("tool_use", "")
            name = f"that of {folder.name}"
            every = [named_templates(each).get("default") for each in folders]
            if unlike := [other for other in every if other not in (None, text)]:
                name += f"; {len(unlike)} of {len(folders)} checkpoints have another"
            return ChatTemplate(name, text, tools, _special_tokens([folder, *folders]))
    name = folders[0].name if folders else "the model"
    raise CorpusError(
        f"the text has `messages`, and `{name}` has no chat template",
        hint="give one with `--set chat_template=FILE`, or give text in `text`",
    )


def has_template(folders: Sequence[Path]) -> bool:
    """Return whether a folder has a chat template, even one that cannot be read."""
    try:
        return any(map(named_templates, folders))
    except CorpusError:
        return True


def named_templates(folder: Path) -> dict[str, str]:
    files = {"default": folder / _TEMPLATE}
    files |= {p.stem: p for p in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    named = {name: _text(path, OTHER_TEMPLATE) for name, path in files.items() if path.is_file()}
    if named:
        return named
    value = read_table(folder / _SETTINGS).get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    pairs = value if isinstance(value, list) else []
    return {
        str(pair.get("name")): pair["template"]
        for pair in pairs
        if isinstance(pair, dict) and isinstance(pair.get("template"), str)
    }


def _text(path: Path, hint: str) -> str:
    try:
        return read_regular(path, _LARGEST_TEMPLATE_NBYTES).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the chat template `{path}` cannot be read: {reason.lower()}"
        raise CorpusError(message, hint=hint) from error


def _special_tokens(folders: Iterable[Path]) -> dict[str, str]:
    tables = (read_table(folder / _SPECIAL) | read_table(folder / _SETTINGS) for folder in folders)
    table = next(filter(None, tables), {})
    values = ((name, table.get(name)) for name in _TOKENS)
    texts = ((n, v.get("content") if isinstance(v, dict) else v) for n, v in values)
    return {name: text for name, text in texts if isinstance(text, str)}


MESSAGES, TOOLS = "messages", "tools"
_FORM = 'write {"messages": [{"role": "user", "content": "..."}, ...]} on each line'
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # fields of a message, first the usual


@dataclass(frozen=True, eq=False)
class Chat:
    """Makes documents of conversations; the template is read with the first one."""

    folders: Sequence[Path]
    tokenizer: Tokenizer
    templates: Templates
    file: str | None = None  # in place of the checkpoint's template
    score: Literal["answer", "all"] = "answer"
    reasoning: str | None = None  # its markers, in place of the template's own
    with_spans: bool = True  # calibration text needs none

    def __post_init__(self) -> None:
        if self.reasoning is not None and len(self.reasoning.split()) != 2:
            raise UsageError(
                f"`--set reasoning={self.reasoning}` is not two markers",
                hint="write what begins and ends it: `--set reasoning='<think> </think>'`",
            )
        if self.file is not None:  # one that cannot be read is refused whatever the text is
            template_in_file(self.file, self.folders)

    @cached_property
    def template(self) -> ChatTemplate:
        if self.file is not None:
            return template_in_file(self.file, self.folders)
        return template_of(self.folders)

    @cached_property
    def markers(self) -> tuple[Marker, ...]:
        """The markers that the template contains; those given replace its own of reasoning."""
        text = f"{self.template.text}{self.template.with_tools}"
        contained = (m for m in MARKERS if m[1] in text and m[2] in text)
        if self.reasoning is None:
            return tuple(contained)
        begin, end = self.reasoning.split()
        return ((REASONING, begin, end), *(m for m in contained if m[0] != REASONING))

    @property
    def token_markers(self) -> tuple[TokenMarker, ...]:
        """The markers as tokens; none without a template."""
        if self.file is None and not any(map(named_templates, self.folders)):
            return ()
        return tuple(
            TokenMarker(role, tuple(self.ids(begin)), tuple(self.ids(end)))
            for role, begin, end in self.markers
        )

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Return what is written down about it; nothing where no conversation was rendered."""
        if "template" not in vars(self):
            return ()
        template = self.template
        sha256 = hashlib.sha256(f"{template.text}{template.with_tools}".encode()).hexdigest()
        about = (("chat_template", template.name), ("chat_template_sha256", sha256))
        return (*about, ("scored", self.score))

    def document(
        self, name: str, where: str, value: Mapping[str, Any], key: str, stratum: str = ""
    ) -> Document:
        """Return a conversation as a document; CorpusError names what is wrong with it."""
        talk = self._conversation(value, key, where)
        if not self.tokenizer.is_fast:
            raise CorpusError(
                f"{where} is a conversation, and this tokenizer does not say where its tokens are",
                hint="give the text itself in `text`, or a model with a `tokenizer.json`",
            )
        spans = talk.scored if self.with_spans else None
        return Document(name, talk.text, stratum, is_chat=True, spans=spans)

    def prompt(self, where: str, value: Mapping[str, Any]) -> str:
        talk = self._conversation(value, MESSAGES, where)
        return talk.render(talk.messages, prompt=True)[0]

    def _conversation(self, value: Mapping[str, Any], key: str, where: str) -> _Conversation:
        messages, tools = _messages(value.get(key), key, where), _tools(value.get(TOOLS), where)
        return _Conversation(self, messages, tools, where)

    def without_spans(self) -> Chat:
        return replace(self, with_spans=False)

    def ids(self, text: str) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return list(encoded["input_ids"])


@dataclass(frozen=True, eq=False)
class _Conversation:
    """One conversation, rendered whole and in prefixes."""

    chat: Chat
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    where: str

    @cached_property
    def whole(self) -> tuple[str, list[tuple[int, int]]]:
        text, places = self.render(self.messages)
        must_be_unicode(text, self.where)
        return text, places

    @property
    def text(self) -> str:
        return self.whole[0]

    @cached_property
    def ids(self) -> list[int]:
        return self.chat.ids(self.text)

    def render(
        self, messages: list[dict[str, Any]], *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        template = self.chat.template
        text = template.with_tools if self.tools is not None else ""
        values: dict[str, Any] = {"messages": messages, "tools": self.tools, "documents": None}
        values |= {"add_generation_prompt": prompt, **template.tokens}
        try:
            return self.chat.templates.render_chat(text or template.text, values)
        except TemplateError as error:
            raise CorpusError(
                f"{self.where} cannot be rendered: {error.message}", hint=OTHER_TEMPLATE
            ) from error

    def scored(self) -> tuple[tuple[RoleSpan, ...], bool]:
        """Return what is scored, and whether the last answer alone is."""
        spans, is_cut = self._written()
        if self.chat.score == "all":
            every, position = [], 0
            for span in spans:
                every += [RoleSpan(position, span.start, PROMPT), span]
                position = span.stop
            return (*every, RoleSpan(position, len(self.text), PROMPT)), is_cut
        if not spans and is_cut:
            raise CorpusError(
                f"no answer in {self.where} can be separated from its prompt: the template "
                "renders the messages before it otherwise than all of them",
                hint="give a template with `{% generation %}` by `--set chat_template=FILE`, "
                "or use `--set score=all`",
            )
        if not spans:
            raise CorpusError(
                f"no token of {self.where} is scored: no message is of the role `assistant`",
                hint="leave the conversation out, or use `--set score=all`",
            )
        return spans, is_cut

    def _written(self) -> tuple[tuple[RoleSpan, ...], bool]:
        """Return what the model wrote, and whether that is its last answer alone."""
        answers = [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]
        text, places = self.whole
        is_cut = False
        if not places:
            separate = [self._place(k) for k in answers]
            if is_cut := None in separate:
                answers = answers[-1:]
                separate = separate[-1:]
                if None in separate and answers[0] + 1 == len(self.messages):
                    # The last answer is behind what it has in common with another answer.
                    silent = {"role": "assistant", "content": "\0"}
                    other, _ = self.render([*self.messages[:-1], silent])
                    pairs = zip(other, text, strict=False)
                    start = next((n for n, (a, b) in enumerate(pairs) if a != b), len(text))
                    separate = [(start, len(text.rstrip()))]
            places = [place for place in separate if place is not None]
        spans: list[RoleSpan] = []
        for number, (start, stop) in enumerate(places):
            of_message = len(places) == len(answers)  # a template may mark more than answers
            message = self.messages[answers[number]] if of_message else {}
            spans += _parts(text, start, stop, self.chat.markers, message)
        return tuple(span for span in spans if span.stop > span.start), is_cut

    def _place(self, k: int) -> tuple[int, int] | None:
        """Return where an answer is, if the messages before it are a prefix of the whole."""
        try:
            before, _ = self.render(self.messages[:k], prompt=True)
            after = self.text
            if k + 1 < len(self.messages):
                after, _ = self.render(self.messages[: k + 1])
        except CorpusError:  # a template may refuse to begin, or to end, with such a message
            return None
        if not self.text.startswith(after) or not after.startswith(before):
            return None
        prefix = self.chat.ids(before)
        return (len(before), len(after.rstrip())) if self.ids[: len(prefix)] == prefix else None


def _parts(
    text: str, start: int, stop: int, markers: Sequence[Marker], message: Mapping[str, Any]
) -> Iterator[RoleSpan]:
    """Cut what a model wrote into reasoning, calls and the answer; markers belong to what is in."""
    is_call = bool(message.get("tool_calls")) and not message.get("content")
    marked = any(role == CALL and text.find(begin, start, stop) >= 0 for role, begin, _ in markers)
    rest = CALL if is_call and not marked else ANSWER
    for role, begin, end in markers:  # the prompt may have begun the reasoning
        until = text.find(end, start, stop) if end and role == REASONING else -1
        if until >= 0 and not start <= text.find(begin, start, stop) < until:
            yield RoleSpan(start, until + len(end), role)
            start = until + len(end)
    of_begin = {begin: (role, end) for role, begin, end in markers}
    begins = re.compile("|".join(map(re.escape, of_begin)) or "(?!)")
    while match := begins.search(text, start, stop):
        yield RoleSpan(start, match.start(), rest)
        role, end = of_begin[match.group()]
        until = text.find(end, match.end(), stop) if end else -1
        start = stop if until < 0 else until + len(end)
        yield RoleSpan(match.start(), start, role)
    yield RoleSpan(start, stop, rest)


def _messages(value: Any, key: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        wrong = "is empty" if value == [] else "is no list of messages"
        raise CorpusError(f"`{key}` in {where} {wrong}", hint=_FORM)
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CorpusError(f"message {number} in {where} has no `role`", hint=_FORM)
        message = {name: part for name, part in message.items() if part is not None}
        thought = next((message[name] for name in _THOUGHTS if name in message), None)
        if thought is not None:
            message = {"thinking": thought, **message, "reasoning_content": thought}
        messages.append(message)
    return messages


def _tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str):  # tables often have them as text
        try:
            value = json.loads(value.strip() or "null")
        except (ValueError, RecursionError):
            value = {}
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise CorpusError(
            f"`tools` in {where} is no list of objects",
            hint='write {"tools": [{"type": "function", "function": {...}}], ...}, or leave it out',
        )
    return value
