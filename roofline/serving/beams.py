"""Blocks that beam search shares: beams fork from their parents, write into copies, and those that nobody follows are freed.

Which beams survive a step is up to the model. Here each beam of a step follows one of the step before, all equally likely,
as in a neutral model of descent: what beams have in common grows with the text but for the last few tokens. The blocks are
those of the real allocator.
Source: Kwon et al. 2023, the vLLM paper (arXiv 2309.06180), section 4.4; figure 15 measures 37.6 to 55.2 % of blocks saved
with 2 to 6 beams on Alpaca, 44.3 to 66.3 % on ShareGPT.
"""

from __future__ import annotations

from random import Random
from statistics import mean

from roofline.errors import InputError
from roofline.serving.allocator import Allocator

WIDEST = 64
RUNS = 8
"""Searches over which a share is averaged."""


def _saved(prompt: int, beams: int, output: int, block: int, dice: Random) -> tuple[float, int]:
    """(share of blocks saved, averaged over the steps; copies on write) of one search."""
    number = beams * (-(-(prompt + output) // block) + 1)
    pool = Allocator(2 * number, block)
    pool.allocate((0, 0), prompt)
    for beam in range(1, beams):
        pool.fork((0, 0), (0, beam))
    shares, copies = [], 0
    for step in range(1, output + 1):
        for beam in range(beams):
            pool.fork((step - 1, dice.randrange(beams)), (step, beam))
        for beam in range(beams):
            pool.free((step - 1, beam))
        copies += sum(pool.append((step, beam)) is not None for beam in range(beams))
        shares.append(1 - pool.used / (beams * pool.needed(prompt + step)))
    return mean(shares), copies


def beam_sharing(prompt: int, beams: int, output: int, block: int = 16, seed: int = 0) -> tuple[float, float]:
    """(share of the blocks of beams that sharing saves, averaged over the output; blocks copied on write in a search).

    Raises InputError for sizes out of range.
    """
    sizes = (("isl", prompt, 10**5), ("beams", beams, WIDEST), ("osl", output, 10**4), ("block-size", block, 10**6))
    for name, value, most in sizes:
        if not 1 <= value <= most:
            raise InputError(f"{name}: {value:,} is out of range; give 1 to {most:,}")
    dice = Random(seed)
    found = [_saved(prompt, beams, output, block, dice) for _ in range(RUNS)]
    return mean(share for share, _ in found), mean(copies for _, copies in found)
