from dataclasses import fields
from types import MappingProxyType

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from qaudit.core.registry import (
    merges,
    parse_merge,
    parse_scheme,
    parse_schemes,
    scheme_sets,
    schemes,
)
from qaudit.errors import SchemeError
from qaudit.settings import DEFAULT_SCHEMES

PAPER_A = "act_order=true:act_group_aware=false"
SHARE = st.floats(1e-9, 0.999, allow_nan=False)
VALUES = {  # of parameters, besides all that are true or false
    "act": st.sampled_from([4, 8, 16]),
    "alpha": SHARE,
    "bits": st.integers(2, 8),
    "block": st.just(-1) | st.integers(1, 4096),
    "blocksize": st.sampled_from([32, 64, 1024]),
    "budget": st.floats(4, 7),
    "damp": SHARE,
    "damp_increment": SHARE,
    "down": st.sampled_from([4, 8]),
    "format": st.sampled_from(["nvfp4", "mxfp4"]),
    "fused": st.sampled_from(["auto", "true", "false"]),
    "group": st.just(-1) | st.integers(1, 4096),
    "keep": st.integers(0, 999),
    "members": st.sampled_from(["46", "468"]),
    "rule": st.sampled_from(["even", "floor"]),
    "steps": st.integers(0, 99),
    "threshold": st.floats(0, 1e6),
    "tie": st.sampled_from(["fused", "none"]),
}


@st.composite
def any_scheme(draw):
    plugin = schemes()[draw(st.sampled_from(sorted(schemes().built_in)))]
    values = {
        field.name: draw(st.booleans() if isinstance(field.default, bool) else VALUES[field.name])
        for field in fields(plugin)
        if field.name in VALUES or isinstance(field.default, bool)
    }
    try:
        return plugin(**values)
    except SchemeError:  # two that exclude each other
        reject()


def test_every_scheme_is_found_and_named_in_a_registry_that_cannot_be_changed():
    for registry in (schemes(), merges()):
        assert not hasattr(registry, "__setitem__")
        assert isinstance(registry.built_in, MappingProxyType)


@given(any_scheme())
def test_canonical_and_short_forms_read_back(scheme):
    assert parse_scheme(scheme.spec) == scheme
    assert parse_scheme(scheme.short) == scheme
    assert parse_scheme(scheme.short).spec == scheme.spec


def test_the_canonical_form_spells_every_parameter_in_order():
    canonical = (
        "gptq:bits=4:group=128:sym=true:act_order=false:act_group_aware=true"
        ":static_groups=false:damp=0.05:damp_increment=0.01:scale_dtype=bf16"
    )
    assert parse_scheme("gptq-4bit").spec == canonical
    assert parse_scheme("gptq-4bit:fused=true").spec == f"{canonical}:fused=true"


FORMS = {
    "gptq-4bit": ("gptq-4bit", " gptq-4bit ", "gptq:bits=4", "gptq-4bit:group=128",
                  "gptq-4bit:preset=gptqmodel"),
    "gptq-4bit:group=64": ("gptq:group=64:bits=4",),
    "rtn-8bit:group=-1": ("rtn-8bit:group=-1",),
    "rtn-4bit:sym=false": ("rtn-4bit:sym=False",),
    "gptq-3bit:damp=0.01": ("gptq-3bit:damp=1e-2",),
    "bnb-nf4": ("bnb-nf4",),
    "bnb-int8:threshold=4.0": ("bnb-int8:threshold=4",),
    "awq-4bit": ("awq-4bit:scale_dtype=bf16",),
    "awq-4bit:scale_dtype=float32": ("awq-4bit:scale_dtype=float32",),
    "gptq-4bit (paper-a)": ("gptq-4bit:preset=paper-a", f"gptq-4bit:{PAPER_A}:scale_dtype=float32"),
    "gptq-4bit (paper-a):group=64":
        ("gptq-4bit:preset=paper-a:group=64", "gptq-4bit (paper-a):group=64"),
    f"gptq-4bit:{PAPER_A}:damp=0.01:scale_dtype=float32": ("gptq-4bit:preset=paper-a:damp=0.01",),
    "gptq-3bit (llm-compressor)": ("gptq-3bit:preset=llm-compressor",),
    "gptq-4bit (autogptq)": ("gptq-4bit:preset=autogptq",),
    "awq-4bit (llm-compressor)": ("awq-4bit:preset=llm-compressor",),
    "awq-4bit (autoawq)": ("awq-4bit:preset=autoawq",),
    "rtn-4bit (paper-b)": ("rtn:preset=paper-b", "rtn-4bit:preset=paper-b"),
    "rtn-8bit (paper-b-int8)": ("rtn:preset=paper-b-int8",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "short"), [(text, short) for short, texts in FORMS.items() for text in texts]
)
def test_every_form_between_short_and_canonical_is_read(text, short):
    assert parse_scheme(text).short == short


WRONG = {
    "9 bits is out of range": ("gptq-9bit", "quik-4bit:down=9"),
    "1 bits is out of range": ("rtn-1bit",),
    "0 bits is out of range": ("awq-0bit",),
    "a group of 0 columns": ("gptq-4bit:group=0", "hqq-4bit:group=0", "duquant-4bit:block=0"),
    "a group of -2 columns": ("gptq-4bit:group=-2",),
    "scales in `fp8` are not supported": ("rtn-4bit:scale_dtype=fp8",),
    "a group of -128 columns": ("rtn-4bit:group=-128",),
    "is not a whole number": ("gptq-4bit:group=12.5",),
    "is not true or false": ("gptq-4bit:sym=maybe", "gptq-4bit:sym=1"),
    "is not a number": ("gptq-4bit:damp=much", "gptq-4bit:damp=nan"),
    "out of range": (
        "gptq-4bit:damp=0",
        "gptq-4bit:damp=1.5",
        "gptq-4bit:damp_increment=-0.1",
        "bnb-int8:threshold=-1",
    ),
    "does not exist in bitsandbytes": ("bnb-nf4:blocksize=100",),
    "is not a parameter": ("gptq-4bit:group", "gptq-4bit:=3", "gptq-4bit:group=", "gptq-4bit:"),
    "given twice": ("gptq-4bit:group=64:group=64",),
    "gives bits twice": ("gptq-4bit:bits=4",),
    "no preset `paper-z`": ("gptq-4bit:preset=paper-z",),
    "no preset `paper-a`": ("bnb-nf4:preset=paper-a",),
    "scales in `fp16` are not supported": ("hqq-4bit:scale_dtype=fp16",),
    "no format `int4`": ("mr-gptq:format=int4",),
    "4-bit floats of 8 bits": ("mr-gptq:act=8",),
    "a block of 0 columns": ("mr-gptq:block=0",),
    "a damp of 0.0": ("mr-gptq:damp=0", "quarot-4bit:damp=0"),
    "no rule `up`": ("mxfp4:rule=up",),
    "an alpha of 1.5": ("smoothquant:alpha=1.5", "gptaq-4bit:alpha=1.5"),
    "a clip of 0.0": ("quarot-4bit:clip=0", "atom-4bit:weight_clip=0"),
    "a clip of 1.1": ("quarot-4bit:clip=1.1",),
    "activations of 1 bits": ("quarot-4bit:act=1",),
    "activations of 12 bits": ("quarot-4bit:act=12",),
    "16 bits is out of range": ("quik-4bit:act=16", "atom-4bit:act=16"),
    "-1 columns cannot keep more bits": ("quik-4bit:keep=-1",),
    "a threshold of -1.0": ("quik-4bit:threshold=-1",),
    "-3 columns cannot keep more bits": ("atom-4bit:keep=-3",),
    "a clip of 2.0": ("atom-4bit:clip=2",),
    "-1 steps are out of range": ("spinquant-4bit:steps=-1",),
    "100001 steps are out of range": ("base-q-w4a4:steps=100001",),
    "`some` names no search over ratios": ("awq-4bit:ratios=some",),
    "`maybe` is not a way to round columns": ("gptq-4bit:fused=maybe",),
    "a cache of keys and values in `int2`": ("gptq-4bit:kv=int2",),
    "`tie=some` ties no linears": ("gptq-mix:tie=some",),
}


@pytest.mark.parametrize(
    ("text", "words"), [(text, words) for words, texts in WRONG.items() for text in texts]
)
def test_a_wrong_parameter_is_refused_with_a_hint(text, words):
    with pytest.raises(SchemeError) as refused:
        parse_scheme(text)
    assert words in refused.value.message
    assert refused.value.hint
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("parse", "text", "message", "hint"),
    [
        *(
            (parse_scheme, text, f"there is no scheme `{text}`", f"did you mean `{meant}`?")
            for text, meant in {
                "gptq4": "gptq-4bit",
                "gptq-4bits": "gptq-4bit",
                "GPTQ-3bit": "gptq-3bit",
                "gtpq-8bit": "gptq-8bit",
                "rtn4bit": "rtn-4bit",
                "nf4": "bnb-nf4",
                "bnb-nf4-4bit": "bnb-nf4",
                "bnb_int8": "bnb-int8",
                "fp4": "bnb-fp4",
                "ship-2027": "ship-2026",
            }.items()
        ),
        *(
            (parse_scheme, text, f"there is no scheme `{text}`", f"archived; its algorithm {where}")
            for where, texts in {
                "is built in, as `gptq-4bit`": ("auto-gptq", "autogptq", "AutoGPTQ-4bit"),
                "is built in, as `awq-4bit`": ("autoawq", "auto_awq"),
            }.items()
            for text in texts
        ),
        (parse_scheme, "xyzzy", "there is no scheme `xyzzy`", f"there are: {', '.join(schemes())}"),
        (parse_scheme, "gptq", "`gptq` needs bits", "write `gptq-4bit`"),
        (parse_scheme, "fp", "there is no scheme `fp`", "always measured"),
        (parse_scheme, "bitsandbytes", "there is no scheme", "bnb-nf4"),
        (parse_scheme, "gptq-4bit:gruop=64", "no parameter `gruop`", "did you mean `group`?"),
        (parse_scheme, "gptq-4bit:xyzzy=1", "no parameter `xyzzy`", "act_order"),
        (parse_merge, "ties", "there is no merge `ties`", "mean"),
        (parse_merge, "meann", "there is no merge `meann`", "did you mean `mean`?"),
        (parse_schemes, ["rtn-4bit,rtn-4bit"], "named twice", "once"),
        (parse_schemes, ["rtn-4bit", "rtn:bits=4"], "named twice", "once"),
        (parse_schemes, ["gptq-4bit:group=128,gptq-4bit"], "named twice", "once"),
        *((parse_schemes, texts, "no scheme is named", "rtn") for texts in ([], [""], [" , "])),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(parse, text, message, hint):
    with pytest.raises(SchemeError) as refusal:
        parse(text)
    assert message in refusal.value.message
    assert hint in refusal.value.hint


def test_lists_keep_their_order_and_settings_of_a_study_say_what_was_inferred():
    shorts = [scheme.short for scheme in parse_schemes(["rtn-4bit, gptq-3bit", "bnb-nf4,"])]
    assert shorts == ["rtn-4bit", "gptq-3bit", "bnb-nf4"]
    assert tuple(scheme.short for scheme in parse_schemes(DEFAULT_SCHEMES)) == DEFAULT_SCHEMES
    assert "inferred" in parse_scheme("gptq-4bit:preset=paper-a").remark
    assert "paper-b" in parse_scheme("rtn-4bit:sym=false:scale_dtype=float32").remark
    for text in ("rtn-4bit:sym=false", "gptq-4bit"):  # scales in bfloat16; no study's
        assert parse_scheme(text).remark is None


# ------------------------------------------------------------------------------------------ sets


def test_a_set_is_its_schemes_and_mixes_with_others_that_may_overlap():
    for name, texts in scheme_sets().items():
        expected = [parse_scheme(text) for text in texts]
        assert list(parse_schemes([name])) == expected
        assert len(set(expected)) == len(expected) > 1
    shorts = [scheme.short for scheme in parse_schemes(["w4a4,nvfp4", "ship-2026", "rtn-2bit"])]
    assert len(shorts) == len(set(shorts))
    assert set(scheme_sets()["w4a4"]) | set(scheme_sets()["ship-2026"]) < set(shorts)
    assert shorts[-1] == "rtn-2bit"
    with pytest.raises(SchemeError, match="named twice"):
        parse_schemes(["w4a4,nvfp4,nvfp4"])


def test_the_sets_of_w4a4_and_of_all_have_every_scheme_that_takes_every_model():
    """Of weights and activations of four bits by default; one that is new has to be added."""
    named = parse_schemes(["w4a4"])
    assert {scheme.bit_class for scheme in named} == {"w4a4"}
    assert {s for s in parse_schemes(["all"]) if s.bit_class == "w4a4"} <= set(named)
    assert "gguf-q4_k_m" in scheme_sets()["ship-2026"]  # the usual file
    names = {scheme.name for scheme in parse_schemes(["all"])}
    plugins = {p for p in schemes().values() if p.any_model and not p.mixes_bits}
    assert names == {plugin.name for plugin in plugins}
    mixtures = {name for name in schemes().built_in if name.endswith("-mix")}
    assert set(schemes().built_in) - names == {"smoothquant", *mixtures}
