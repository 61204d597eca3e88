"""What the generators of this folder share: write a file, or with --check fail when the committed one is stale."""

from __future__ import annotations

import sys
from pathlib import Path


def write(script: str, name: str, text: str) -> int:
    """Write ``text`` to ``name`` beside the script, or compare it; the exit status."""
    target = Path(script).with_name(name)
    if "--check" not in sys.argv[1:]:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return 0
    print(f"{target} is stale: run python docs/{Path(script).name}", file=sys.stderr)
    return 1
