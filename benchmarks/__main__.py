"""Every benchmark against a peer, one after the other: `make bench`."""

from __future__ import annotations

import sys

from benchmarks import audit, solve

if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("run `python -m benchmarks.solve` or `python -m benchmarks.audit` for options")
    solve.main()
    print()
    audit.main()
