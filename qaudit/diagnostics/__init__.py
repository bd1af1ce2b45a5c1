"""Diagnostics: why quantization costs what it costs. Each is a module here, looked up by name.

A module holds any of these. Other rooms look them up (`diagnostic.module`, `diagnostic.parts`) and
never name a diagnostic:

- a `Diagnostic`, the parameters of one and what it adds to a plan (`work`). A module
  without one is not requested; it is computed for every audit from the measurements (`phases`).
- `judge(table, tables) -> (tables, findings)`, from measurements and rows, where it is requested.
- `summarize(rows, before) -> rows`, from the rows of all subjects (`weights`).
- `section(view) -> Section`, for card and page; equal titles are one section.
- `FIGURE`, a `DiagnosticFigure`.

`NAME_measure` beside it has `MEASURE`, a `Measure` (`case.py`), and alone imports torch. A
diagnostic that is computed from measurements has none (`positions`).
"""
