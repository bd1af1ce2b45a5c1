"""Tokenizers, texts, and conversations with chat templates in the styles of released models."""

import json
from contextlib import contextmanager

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from qaudit.sandbox import Limits, Templates
from qaudit.text.chat import Chat

TEXTS = ["the cat sat on the mat and the dog sat on the cat", "caf\u00e9 na\u00efve \U0001f600 ok"]


def byte_level(*, own_bos=False):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"special_tokens": ["<s>", "</s>"], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, **special)
    bpe.train_from_iterator(TEXTS, trainer)
    if own_bos:
        ids = [("<s>", 0), ("</s>", 1)]
        bpe.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ids)
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=8, **ends)


def words():
    """Return a tokenizer that throws spaces away and knows no BOS."""
    level = Tokenizer(models.WordLevel({"?": 0, "a": 1, "bb": 2}, unk_token="?"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=level, unk_token="?")


BYTES, OWN_BOS, WORDS = byte_level(), byte_level(own_bos=True), words()


def lines(*texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
]

CHATML = """\
{%- if tools %}
<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: 26 Jul 2024<|eot_id|>' }}
{%- for message in messages %}
{%- set head = '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' %}
{{- head ~ (message['content'] | trim) ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}\
{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}"""

THINKING = """\
{%- set last = namespace(user=0) %}
{%- for message in messages if message.role == 'user' %}
{%- set last.user = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.index0 > last.user %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "marked": MARKED}
TEMPLATES |= {"thinking": THINKING}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


TALK = [
    said("user", "the cat?"),
    said("assistant", "sat on the mat"),
    said("user", "na\u00efve \U0001f600 ok"),
    said("assistant", 'the dog <b> & "caf\u00e9" '),
]
THOUGHT = [
    said("user", "one?"),
    said("assistant", "yes", reasoning_content="it is so"),
    said("user", "two?"),
    said("assistant", "no", reasoning_content="the dog sat"),
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ARGUMENTS = {"at": "<mat>"}
CALLED = [
    said("user", "where is the cat?"),
    said("assistant", None, tool_calls=[{"function": {"name": "look", "arguments": ARGUMENTS}}]),
    said("tool", "on the mat"),
    said("assistant", "on the mat"),
]


def tokenizer(template):
    """Return a tokenizer with the special tokens of all templates, and a template."""
    made = byte_level()
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.chat_template = template
    made.model_max_length = 1 << 20
    return made


def saved(folder, template):
    """Write a tokenizer as a repository has it."""
    made = tokenizer(template)
    made.save_pretrained(folder)
    return made


@contextmanager
def chat_of(folder, template, **settings):
    """Yield what makes documents of conversations with the template of a folder."""
    limits = settings.pop("limits", Limits())
    with Templates(limits) as templates:
        yield Chat([folder], saved(folder, template), templates, **settings)
