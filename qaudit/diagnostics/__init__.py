"""Diagnostics: why quantization costs what it costs. Each is a package here, looked up by name.

A package holds any of these parts. Other rooms look a part up (`registry.part`, `registry.parts`)
and never name a diagnostic:

- `parameters`: a `Diagnostic`, the parameters of `--diagnose` and what it adds to a plan (`work`).
  A package without this part is not requested; it is computed for every audit from the
  measurements (`phases`).
- `measure`: `MEASURE`, a `Measure` (`case.py`). The only part that imports torch. A diagnostic that
  is computed from measurements has none (`positions`).
- `judge`: `judge(table, tables) -> (tables, findings)`, from measurements and rows, where the
  diagnostic is requested.
- `section`: `section(view) -> Section`, for card and page; equal titles are one section. What the
  other drawings of the package need of the rows is here, too.
- `figure`: `NAME`, `ALT`, `is_drawn(view)` and `draw(view) -> Chart`.
- `overlay`: `draw(...)` and `explained(...)`, marks on the figure along the series.
"""
