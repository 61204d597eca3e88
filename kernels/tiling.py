"""Sizes of tiles, whole numbers."""

from __future__ import annotations


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that holds ``size`` elements, and ``least``."""
    return max(least, 1 << (size - 1).bit_length())
