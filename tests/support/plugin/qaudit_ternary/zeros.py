"""What `--set diagnostics=zeros` takes."""

from qaudit.diagnostics.diagnostic import Diagnostic


class Zeros(Diagnostic):
    """The share of weights that are zero."""

    name = "zeros"
