"""Chat templates: where a checkpoint has them, what they may name, and their markers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from qaudit.errors import CorpusError
from qaudit.types import CALL, REASONING
from qaudit.whole import read_regular

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

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"{self.text}{self.with_tools}".encode()).hexdigest()

    def markers(self, reasoning: str | None) -> tuple[Marker, ...]:
        """Return the markers that it contains; those given replace its own of reasoning."""
        text = f"{self.text}{self.with_tools}"
        own = (m for m in MARKERS if m[1] in text and m[2] in text)
        if reasoning is None:
            return tuple(own)
        begin, end = reasoning.split()
        return ((REASONING, begin, end), *(m for m in own if m[0] != REASONING))


def template_in_file(file: str, folders: Sequence[Path]) -> ChatTemplate:
    try:
        text = read_regular(Path(file), _LARGEST_TEMPLATE_NBYTES).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CorpusError(
            f"the chat template `{file}` cannot be read: {reason.lower()}",
            hint="name a Jinja file: `--set chat_template=FILE`",
        ) from error
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
    _no_template(folders)


def _no_template(folders: Sequence[Path]) -> NoReturn:
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
    named = {name: _text(path) for name, path in files.items() if path.is_file()}
    if named:
        return named
    value = _table(folder / _SETTINGS).get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    pairs = value if isinstance(value, list) else []
    return {
        str(pair.get("name")): pair["template"]
        for pair in pairs
        if isinstance(pair, dict) and isinstance(pair.get("template"), str)
    }


def _text(path: Path) -> str:
    try:
        return read_regular(path, _LARGEST_TEMPLATE_NBYTES).decode()
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"the chat template `{path}` cannot be read", hint=OTHER_TEMPLATE
        ) from error


def _special_tokens(folders: Sequence[Path]) -> dict[str, str]:
    for folder in folders:
        table = _table(folder / _SPECIAL) | _table(folder / _SETTINGS)
        if table:
            values = ((name, table.get(name)) for name in _TOKENS)
            texts = ((n, v.get("content") if isinstance(v, dict) else v) for n, v in values)
            return {name: text for name, text in texts if isinstance(text, str)}
    return {}


def _table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_regular(path).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}
