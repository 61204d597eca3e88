"""Write docs/formulas.md from the formula book; with --check, fail when the committed file is stale."""

from __future__ import annotations

import sys

from fresh import write

from roofline.formulas import markdown

if __name__ == "__main__":
    sys.exit(write(__file__, "formulas.md", markdown()))
