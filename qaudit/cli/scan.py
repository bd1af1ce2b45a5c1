"""`qaudit scan`: measure checkpoints and soups under quantization schemes."""

from __future__ import annotations

import sys

from qaudit.cli import options as o


def scan(
    targets: o.Targets,
    schemes: o.Schemes = None,
    checkpoints: o.Checkpoints = None,
    stage: o.Stage = None,
    every: o.Every = None,
    last: o.Last = None,
    limit: o.Limit = None,
    family: o.Family = None,
    soup: o.Soup = None,
    diagnose: o.Diagnose = None,
    calibration: o.Calibration = None,
    evaluation: o.Evaluation = None,
    choices: o.Choices = None,
    context: o.Context = None,
    stride: o.Stride = None,
    bos: o.Bos = None,
    packed: o.Packed = None,
    evaluation_documents: o.EvaluationDocuments = None,
    calibration_documents: o.CalibrationDocuments = None,
    document_tokens: o.DocumentTokens = None,
    calibration_seed: o.CalibrationSeed = None,
    repeats: o.Repeats = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    stream_memory: o.StreamMemory = None,
    disk_budget: o.DiskBudget = None,
    update: o.Update = False,
    allow_pickle: o.AllowPickle = False,
    trust_remote_code: o.TrustRemoteCode = False,
    self_check: o.SelfCheck = False,
    cross_check: o.CrossCheck = 0,
    policy: o.Policy = None,
    out: o.Out = None,
    dry_run: o.DryRun = False,
    as_json: o.AsJson = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure what quantization does to checkpoints and soups, and write a report card.

    Run the same command again to go on after an interruption.

    Example: qaudit scan demo
    """
    given = locals()  # first, so that it holds the options and nothing else
    from qaudit.cli.scanning import HOW_TO_RUN, Request, carry_out

    asked = {k: v for k, v in given.items() if k not in HOW_TO_RUN and v is not None}
    sys.exit(carry_out(Request(asked, **{name: given[name] for name in HOW_TO_RUN})))
