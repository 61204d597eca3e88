"""SGLang's admission: room for what those who run are expected to write still.

A waiting request is admitted with room for its prompt and all of its output, beyond ``ratio`` of what each running request may
still write. The ratio falls with every decode step from 0.7 to 0.098, since most requests end early or have ended meanwhile;
when blocks run out, requests that have written least are retracted, wait at the end of the queue, and the ratio becomes the
share of their outputs that the others have written. A batch that decodes and was found full stays so until a request ends or is
retracted; one that starts is asked again once its prompts have run, when its requests count by the ratio only.
Source: sgl-project/sglang, python/sglang/srt/managers/schedule_policy.py (PrefillAdder), schedule_batch.py (retract_decode),
scheduler.py (update_running_batch, batch_is_full) and environ.py (SGLANG_INIT_NEW_TOKEN_RATIO and its neighbours).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roofline.serving.decoding import Drafting, Lockstep
    from roofline.serving.pool import Pool
    from roofline.serving.request import Request


@dataclass(frozen=True)
class Estimate:
    """The ratio's course: where it starts, what it falls to, and in how many decode steps.

    Attributes:
        longest: tokens of an output beyond which nothing is reserved. spare: tokens that each sequence may write after a
            retraction before the next.
    """

    first: float = 0.7
    least: float = 0.7 * 0.14
    steps: int = 600
    longest: int = 4096
    spare: int = 20


class Expectation:
    """What a replica expects of its running requests.

    Attributes:
        ratio: share of what they may still write that is kept free for them. full: nobody is admitted until somebody leaves.
    """

    def __init__(self, estimate: Estimate, pool: Pool) -> None:
        self._estimate, self._pool = estimate, pool
        self.ratio, self.full = estimate.first, False

    def admits(self, request: Request, decoding: Lockstep | Drafting, prefilling: Iterable[Request]) -> bool:
        """Whether a waiting request may run; if not, a batch that decodes is full."""
        started = list(prefilling)
        if not decoding.slots and not started:
            return True
        longest, free = self._estimate.longest, self._pool.free * self._pool.block
        wanted: float = request.target + min(request.output - request.done, longest)
        for other in started:
            wanted += min(other.output - other.done, longest)
        if wanted + self.ratio * decoding.left_of_all < free:
            return True
        wanted += self.ratio * sum(min(left, longest) for left in decoding.lefts())
        self.full = wanted >= free and decoding.slots > 0
        return wanted < free

    def stepped(self, steps: int) -> None:
        """So many decode steps have passed."""
        estimate = self._estimate
        fall = (estimate.first - estimate.least) / estimate.steps
        self.ratio = max(estimate.least, self.ratio - steps * fall)

    def retracted(self, written: int, outputs: int, running: int) -> None:
        """A request had to go; the others have written so many tokens of their outputs."""
        self.ratio = min(1.0, (written + self._estimate.spare * running) / (outputs + 1))
        self.full = False

    def idle(self) -> None:
        """Nobody is there."""
        self.ratio, self.full = self._estimate.first, False
