"""Diagnostics: why quantization costs what it costs. Each is a package here, found by name.

A package holds up to seven parts. Each part is imported only by those that need it, through
`registry.part` and `registry.parts`, so no other room names a diagnostic:

- `parameters`: a `Diagnostic`, the parameters of `--diagnose`. A package without this part is not
  requested; it is computed for every audit from the measurements (`phases`).
- `price`: `price(parameters, schemes, protocol, sizes) -> Price`, for the plan.
- `measure`: `MEASURE`, a `Measure` (`case.py`), the only part that imports torch.
- `judge`: `judge(table, tables) -> (tables, findings)`, from measurements and rows.
- `section`: the section of the card and the page.
- `figure`: the figures of the card and the page.
"""
