"""Conversations: the tokens of `apply_chat_template`, who wrote them, and what is refused."""

import json
import re
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from qaudit.errors import CorpusError, QauditError
from qaudit.sandbox import Limits, Templates
from qaudit.text.chat import Chat, template_of
from qaudit.text.corpus import build_corpus
from qaudit.text.documents import read_documents
from qaudit.text.tokenizer import Cutter
from qaudit.types import ROLES, UNSCORED, Document, Protocol
from tests.support.texts import (
    CALLED,
    CHATML,
    GEMMA,
    LLAMA,
    MARKED,
    TALK,
    TEMPLATES,
    THINKING,
    THOUGHT,
    TOOL,
    chat_of,
    said,
)

PROTOCOL = Protocol(context=1024)


def document(chat, messages, **value):
    value = {"messages": messages, **value}
    return chat.document("d", "line 1 of `chats.jsonl`", value, "messages")


def encoded(chat, messages, **value):
    return Cutter(chat.tokenizer, PROTOCOL).encode(document(chat, messages, **value))


def by_role(chat, messages, **value):
    """Return the text of each role that is scored."""
    cut = encoded(chat, messages, **value)
    assert cut.roles is not None
    assert isinstance(chat.tokenizer, PreTrainedTokenizerFast)
    texts = {
        role: chat.tokenizer.decode(cut.tokens[cut.roles == k]) for k, role in enumerate(ROLES)
    }
    return {role: text for role, text in texts.items() if text}


@pytest.mark.parametrize("style", TEMPLATES)
def test_tokens_are_those_of_transformers(tmp_path, style):
    with chat_of(tmp_path, TEMPLATES[style]) as chat:
        assert isinstance(chat.tokenizer, PreTrainedTokenizerFast)
        calls = [(CALLED, [TOOL])] if style == "chatml" else []
        for messages, tools in ((TALK, None), (THOUGHT, None), (TALK, [TOOL]), *calls):
            wanted = chat.tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
            assert encoded(chat, messages, tools=tools).tokens.tolist() == wanted


def test_generation_markers_score_what_transformers_masks(tmp_path):
    plain = MARKED.replace("- generation %}", "- if true %}").replace("endgeneration", "endif")
    plain += "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    with chat_of(tmp_path / "a", MARKED) as marked, chat_of(tmp_path / "b", plain) as bare:
        assert isinstance(marked.tokenizer, PreTrainedTokenizerFast)
        made = marked.tokenizer.apply_chat_template(
            TALK, return_assistant_tokens_mask=True, return_dict=True
        )
        a, b = encoded(marked, TALK), encoded(bare, TALK)
    assert a.roles is not None
    assert b.roles is not None
    assert (a.roles != UNSCORED).astype(int).tolist() == made["assistant_masks"]
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.roles.tolist() == b.roles.tolist()


@pytest.mark.parametrize("template", [CHATML, LLAMA, GEMMA])
def test_every_answer_is_scored_and_no_prompt(tmp_path, template):
    with chat_of(tmp_path, template) as chat:
        (text,) = by_role(chat, TALK).values()
        assert not encoded(chat, TALK).last_alone
    answers = re.split("<end_of_turn>|<.im_end.>|<.eot_id.>", text)
    assert [part.strip() for part in answers] == [*(TALK[k]["content"].strip() for k in (1, 3)), ""]


BEGUN = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")
BARE_CALLS = CHATML.replace("<tool_call>\\n", "").replace("\\n</tool_call>", "")
COUNTED = "{{ messages | length }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
CALL = '{"name": "look", "arguments": {"at": "<mat>"}}'
SHORT = [said("user", "one?"), said("assistant", "<think>so</think>yes")]
LAST = TALK[3]["content"]


def test_tokens_have_the_role_of_what_they_say(tmp_path):
    for template, settings, messages, roles, last_alone in (
        # Templates that drop reasoning leave the last answer.
        (THINKING, {}, THOUGHT, {"reasoning": "<think>\nthe dog sat\n</think>",
                                 "answer": "\n\nno<|im_end|>"}, True),
        # Reasoning that the prompt began is reasoning, and leaves the last answer.
        (f"{BEGUN}{{# </think> #}}", {}, SHORT,
         {"reasoning": "so</think>", "answer": "yes<|im_end|>"}, False),
        (BEGUN, {}, TALK, {"answer": f"{LAST}<|im_end|>"}, True),
        # Given markers replace those of the template.
        (CHATML, {"reasoning": "[ ]"}, [SHORT[0], said("assistant", "[so]yes")],
         {"reasoning": "[so]", "answer": "yes<|im_end|>"}, False),
        (CHATML, {}, CALLED, {"call": f"<tool_call>\n{CALL}\n</tool_call>",
                              "answer": "<|im_end|>on the mat<|im_end|>"}, False),
        (BARE_CALLS, {}, CALLED, {"call": f"{CALL}<|im_end|>",
                                  "answer": "on the mat<|im_end|>"}, False),
        # The last answer begins where another would differ.
        (COUNTED, {}, TALK, {"answer": f"{LAST}]"}, True),
    ):  # fmt: skip
        with chat_of(tmp_path, template, **settings) as chat:
            assert by_role(chat, messages) == roles
            assert encoded(chat, messages).last_alone == last_alone


def test_all_scores_the_prompt_and_templates_see_one_day_and_tokens(tmp_path):
    with chat_of(tmp_path, CHATML, score="all") as chat:
        (tmp_path / "plain.txt").write_text("the cat")
        (plain,) = read_documents(str(tmp_path / "plain.txt"), chat=chat)
        assert (plain.is_chat, chat.sources) == (False, ())
        cut = encoded(chat, TALK)
        assert cut.roles is not None
        assert (cut.roles != UNSCORED).all()
        answers = [f"{TALK[k]['content']}<|im_end|>" for k in (1, 3)]
        assert by_role(chat, TALK)["answer"] == "".join(answers)
    for template, text in (
        ("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}", "26 Jul 2024the cat?"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|", "<s>|</s>||"),
    ):
        with chat_of(tmp_path, template) as chat:
            assert document(chat.without_spans(), TALK).text == text
    file = tmp_path / "other.jinja"
    file.write_text("{{ bos_token }}other")
    with chat_of(tmp_path, CHATML, file=str(file)) as chat:
        fed = chat.without_spans()
        assert document(fed, TALK).text == "<s>other"
        assert dict(fed.sources)["chat_template"] == str(file)
        assert len(dict(fed.sources)["chat_template_sha256"]) == 64
        assert chat.sources == ()  # nothing was rendered with it


def test_a_template_for_tools_is_used_and_other_templates_counted(tmp_path):
    with chat_of(tmp_path, None) as chat:
        table = json.loads((tmp_path / "tokenizer_config.json").read_text())
        table["chat_template"] = [
            {"name": "default", "template": "plain {{ eos_token }}"},
            {"name": "tool_use", "template": "tools {{ tools | length }}"},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(table))
        fed = chat.without_spans()
        assert document(fed, TALK).text == "plain </s>"
        assert document(fed, TALK, tools=[TOOL]).text == "tools 1"
    for name, text in (("a", "first"), ("b", "first"), ("c", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(text)
    template = template_of([tmp_path / name for name in "abc"])
    told = "that of a; 1 of 3 checkpoints have another"
    assert (template.text, template.name) == ("first", told)


# ------------------------------------------------------------------------------ bad input


def refusal(chat, messages, **value):
    with pytest.raises(CorpusError) as caught:
        encoded(chat, messages, **value)
    assert caught.value.hint
    assert caught.value.code == 2
    return caught.value


NO_LIST = "`tools` in line 1 of `chats.jsonl` is no list"
DAMAGED = [
    ([], None, "`messages` in line 1 of `chats.jsonl` is empty"),
    ("text", None, "is no list of messages"),
    ([{"content": "a"}], None, "message 1 in line 1 of `chats.jsonl` has no `role`"),
    ([said("user", "a"), "b"], None, "message 2 in line 1 of `chats.jsonl` has no `role`"),
    *((TALK, tools, NO_LIST) for tools in ({"name": "look"}, ["look"], "look", '{"name": "a"}')),
    ([said("user", "a")], None, "no token of line 1 of `chats.jsonl` is scored"),
    ([said("user", "\ud800"), said("assistant", "b")], None, "holds half a character"),
]


def test_damaged_conversations_templates_and_settings_are_named(tmp_path):
    with chat_of(tmp_path, CHATML) as chat:
        for messages, tools, wrong in DAMAGED:
            assert wrong in refusal(chat, messages, tools=tools).message
    with pytest.raises(CorpusError, match="has no field `text` or `content`"):
        list(read_documents(written(tmp_path / "e.jsonl", asked(1))))
    with chat_of(tmp_path / "base", None) as chat:
        error = refusal(chat, TALK)
        assert "`base` has no chat template" in error.message
        assert "--set chat_template=FILE" in error.hint
    with chat_of(tmp_path / "other", GEMMA) as chat:
        error = refusal(chat, [said("system", "a"), *TALK])
        assert "cannot be rendered" in error.message
        assert "no system role" in error.message
    for name, value, wrong in (
        ("file", "none.jinja", "chat template `none.jinja` cannot be read"),
        ("reasoning", "<think>", "`--set reasoning=<think>` is not two markers"),
    ):
        with pytest.raises(QauditError, match=wrong), chat_of(tmp_path, CHATML, **{name: value}):
            pass


def test_an_answer_that_cannot_be_separated_from_its_prompt_is_refused(tmp_path):
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [*TALK, said("user", "and then?")]
    with chat_of(tmp_path, template) as chat:
        error = refusal(chat, talk)
        assert "no answer in line 1 of `chats.jsonl` can be separated" in error.message
        assert "{% generation %}" in error.hint
    with chat_of(tmp_path, template, score="all") as chat:
        assert set(by_role(chat, talk)) == {"prompt"}


HOSTILE = (
    "{% for i in range(10**9) %}{% endfor %}",
    "{% generation %}{% for i in range(9999) %}0123456789{% endfor %}{% endgeneration %}",
    "{% for i in range(99999) %}{% generation %}{% endgeneration %}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__.os.system('touch marker') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__.__class__.__mro__ }}",
    "{% generation %}",
)


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_is_refused_within_bounds(tmp_path, monkeypatch, template):
    monkeypatch.chdir(tmp_path)
    limits = Limits(seconds=0.3, nbytes_memory=1 << 28, characters=10_000)
    with chat_of(tmp_path / "model", template, limits=limits) as chat:
        refusal(chat, TALK)
    assert not (tmp_path / "marker").exists()


# --------------------------------------------------------------------------------- corpora


def written(path, *conversations):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
    return str(path)


def spoken(file, chat):
    documents = [*read_documents(file, chat=chat)]
    assert all(document.spans for document in documents)
    return [(d.text, d.spans()) for d in documents if d.spans is not None]


def test_rows_of_parquet_are_the_conversations_of_lines(tmp_path):
    other = json.loads(json.dumps(CALLED))
    other[1]["tool_calls"][0]["function"]["arguments"] = {"on": "the dog", "deep": {"yes": True}}
    rows = [{"messages": m, "tools": t} for m, t in ((TALK, None), (CALLED, [TOOL]), (other, []))]
    lines, file = tmp_path / "talks.jsonl", tmp_path / "talks.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with chat_of(tmp_path, CHATML) as chat:
        wanted = spoken(str(lines), chat)
        assert "<tool_call>" in wanted[1][0]
        assert "Tools: " in wanted[1][0]
        for tools in ([row["tools"] for row in rows], [json.dumps(row["tools"]) for row in rows]):
            table = pyarrow.table({"messages": [row["messages"] for row in rows], "tools": tools})
            pyarrow.parquet.write_table(table, file)
            assert spoken(str(file), chat) == wanted
        for messages, wrong in (
            ([[said("user", "a")], [{"role": None, "content": "b"}]],
             r"message 1 in row 2 of `.*talks.parquet` has no"),
            (["a"], r"`messages` in row 1 of .* is no list of messages"),
        ):  # fmt: skip
            pyarrow.parquet.write_table(pyarrow.table({"messages": messages}), file)
            with pytest.raises(CorpusError, match=wrong):
                list(read_documents(str(file), chat=chat))


def asked(number):
    return [said("user", f"what is {number}?"), said("assistant", f"{number} is {number + 1} - 1")]


def corpus_of(chat, path, fed=None, **protocol):
    fed = fed or [Document("c", "calibration text one")]
    cut = Protocol(context=1024, **protocol)
    return build_corpus(fed, read_documents(path, chat=chat), chat.tokenizer, cut)


def test_a_corpus_scores_answers_and_conversations_with_the_same_prompt_are_no_copies(
    tmp_path, monkeypatch
):
    prompt = said("user", "the cat sat on the mat " * 40)
    talks = [[prompt, said("assistant", text * 20)] for text in ("one ", "two ")]
    path = written(tmp_path / "e.jsonl", asked(1), asked(2))
    fed = written(tmp_path / "c.jsonl", asked(3), asked(4))
    with chat_of(tmp_path, CHATML) as chat:
        corpus = corpus_of(chat, path, read_documents(fed, chat=chat.without_spans()))
        assert len(corpus_of(chat, written(tmp_path / "e.jsonl", *talks)).documents) == 2
    assert corpus.documents[0].nbytes == len("1 is 2 - 1<|im_end|>")
    window = corpus.evaluation[0]
    assert window.roles is not None
    assert window.scored == int((window.roles != UNSCORED).sum()) < len(window.tokens) - 1
    assert [w.roles for w in corpus.calibration] == [None, None]
    # Documents that are only counted are rendered once.
    path = written(tmp_path / "e.jsonl", *(asked(k) for k in range(40)))
    rendered = []
    plain = Templates.render_chat
    monkeypatch.setattr(
        Templates, "render_chat", lambda self, *args: rendered.append(1) or plain(self, *args)
    )
    with chat_of(tmp_path, CHATML) as chat:
        corpus = corpus_of(chat, path, evaluation_documents=4)
    assert corpus.available == 40
    assert len(rendered) == 40 + 4  # of those that are measured on the prompt of the answer, too


def test_last_answers_are_counted_in_a_note_and_conversations_stand_alone(tmp_path):
    path = written(tmp_path / "e.jsonl", THOUGHT, asked(1), asked(2))
    with chat_of(tmp_path, THINKING) as chat:
        notes = corpus_of(chat, path).notes
    assert any("of 1 of 3 conversations the last answer alone" in note for note in notes)
    talks = [{"messages": asked(number)} for number in (1, 2, 3)]
    mixed = "the evaluation text has conversations, and `e.jsonl:1`"
    with chat_of(tmp_path, CHATML) as chat:
        for first, settings, wrong in (
            ({"text": "plain text"}, {}, mixed),
            (talks[2], {"packed": True}, "packed windows run conversations together"),
        ):
            lines = "".join(json.dumps(value) + "\n" for value in (first, *talks[:2]))
            (tmp_path / "e.jsonl").write_text(lines)
            with pytest.raises(CorpusError, match=wrong):
                corpus_of(chat, path, **settings)
        slow = SimpleNamespace(is_fast=False, bos_token_id=None, eos_token_id=None)
        with pytest.raises(CorpusError, match="does not say where its tokens are"):
            document(Chat([tmp_path], slow, chat.templates), TALK)
