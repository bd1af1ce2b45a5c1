"""Templates of others: what they may do, what they may take, and that they reach nothing."""

from pathlib import Path

import pytest

from qaudit.sandbox import Limits, TemplateError, Templates

SMALL = Limits(seconds=0.3, nbytes_memory=1 << 28, characters=10_000, total_characters=25_000)


@pytest.fixture
def templates():
    with Templates(SMALL) as templates:
        yield templates


def test_a_template_is_rendered_as_jinja_does_unless_it_leaves_its_values(
    templates, tmp_path, monkeypatch
):
    text = "{% for c in choices %}{{ loop.index }}. {{ c | trim }}\n{% endfor %}{{ q.upper() }}\n"
    values = {"choices": [" a", "b "], "q": "why\ud800"}
    assert templates.render(text, values) == "1. a\n2. b\nWHY\ud800\n"
    assert templates.render("{{ x | regex_replace('b+', '') }}", {"x": "abbc"}) == "ac"
    monkeypatch.chdir(tmp_path)
    for template in (
        "{{ cycler.__init__.__globals__.os.system('touch marker') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self._TemplateReference__context }}",
        "{{ namespace.__init__['__glob' ~ 'als__'].os.system('touch marker') }}",
        "{{ (x | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(x) }}",
        "{{ '%s' | format(lipsum.__globals__) }}",
        "{% set _ = values.append(1) %}",
        "{% include 'marker' %}",
    ):
        with pytest.raises(TemplateError, match="fails: "):
            templates.render(template, {"x": "a", "values": [1]})
        assert list(tmp_path.iterdir()) == []
        assert templates.render("{{ x }}", {"x": "still here"}) == "still here"


FLOODS = (
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 'a' | center(10**10) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 9 ** 99999999 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% for i in range(9999) %}0123456789{% endfor %}",
    "{{ ('a' * 40) | regex_replace('(a+)+b', '') }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
)


@pytest.mark.parametrize("template", FLOODS, ids=range(len(FLOODS)))
def test_a_template_that_takes_too_much_is_ended(templates, template):
    with pytest.raises(TemplateError, match="fails: "):
        templates.render(template, {})
    assert templates.render("{{ x }}", {"x": "still here"}) == "still here"


def test_values_and_texts_are_bounded_and_none_may_change(templates):
    for template in ("{{ values | random }}", "{{ lipsum() }}", "{{ values.count }}"):
        for is_chat in (True, False):
            with pytest.raises(TemplateError, match="another text each time"):
                templates.render(template, {"values": list(range(50))}, is_chat=is_chat)
    with pytest.raises(TemplateError, match="bytes, more than"):
        Templates(Limits(nbytes_values=1000)).render("{{ x }}", {"x": "a" * 1000})
    with pytest.raises(TemplateError, match="more than 25,000 characters"):
        for _ in range(3):
            templates.render("{{ x }}", {"x": "a" * 9000})


def test_the_process_has_no_secrets_and_ends_with_its_user(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with Templates() as templates:
        templates.render("a", {})
        processes = list(templates._processes)
        assert len(processes) == 2  # the second draws otherwise
        for process in processes:
            environ = Path(f"/proc/{process.pid}/environ")
            assert not environ.exists() or b"hf_secret" not in environ.read_bytes()
    assert all(process.poll() is not None for process in processes)
