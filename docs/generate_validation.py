"""Write docs/validation.md from the committed records; with --check, fail when the committed file is stale."""

from __future__ import annotations

import sys

from fresh import write

from roofline.validate.document import markdown

if __name__ == "__main__":
    sys.exit(write(__file__, "validation.md", markdown()))
