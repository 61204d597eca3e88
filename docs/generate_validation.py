"""Write docs/validation.md from the committed records; with --check, fail when the committed file is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from roofline.validate.document import markdown

TARGET = Path(__file__).with_name("validation.md")


def main() -> int:
    """Write the file, or compare it."""
    text = markdown()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET} is stale: run python docs/generate_validation.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
