"""The way from `scan` to a scheme is short, and CONTRIBUTING lists it."""

import inspect
import re

import qaudit
from qaudit.core.schemes.nearest import RoundToNearest
from tests.house.source import PACKAGE, ROOT
from tests.support.parts import demo

FRAMES = 11
"""It only falls."""


def test_the_way_from_scan_to_a_scheme_is_listed_and_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    series, _, calibration, _, evaluation, *_ = demo(tmp_path)
    frames = []
    quantize = RoundToNearest.quantize

    def watched(self, linears):
        stack = [one for one in inspect.stack()[1:] if str(PACKAGE) in one.filename]
        frames[:] = ["quantize", *(one.function for one in stack)]
        return quantize(self, linears)

    monkeypatch.setattr(RoundToNearest, "quantize", watched)
    qaudit.scan(
        series,
        calibration=str(calibration),
        evaluation=str(evaluation),
        schemes=["rtn-3bit:group=16"],
        checkpoints=["step10"],
        context=32,
        out=tmp_path / "out",
    )
    way = frames[: frames.index("scan") + 1][::-1]
    assert len(way) <= FRAMES, way
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"## The way through\n(.*?)\n## ", page, re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE) == way
