"""Harder splits than a random half: shapes, models and sizes that the fit has not seen, and another framework's constants.

Each refits a family on one side and scores the other. ``unseen_shape`` and ``unseen_model`` hold out whole groups (those
whose label has an even sha256), ``larger`` the half with the longer bounds, ``other_framework`` takes constants as they are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from roofline.expected.calibration import families
from roofline.expected.model import Chip
from roofline.validate.calibrate import LEAST, cleaned, error_of, halves
from roofline.validate.fitting import fit
from roofline.validate.scores import Score
from roofline.validate.silicon.frame import Frame
from roofline.validate.silicon.suite import bound, chip_of, frames

ROWS = 2500
"""Most rows of a refit."""
HIDDEN = {
    "decode": ("memory", "overlap", "block_us", "cache_bytes"), "gemm_q": ("memory", "matrix", "quantise"),
    "latent_decode": ("memory", "matrix", "overlap"),
    "module_decode_q": ("memory", "matrix", "overlap"), "sparse_decode_q": ("memory", "matrix", "overlap"),
}  # fmt: skip
"""Model -> constants that the smaller half of its rows hides under overhead: ``larger`` keeps them at the shared prior."""


def distinct(families: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(family, model) -> a name of its own: the kernel is followed by the time model where several share the family's name."""
    pairs = list(families)
    shared = {name for name, times in Counter(name for name, _ in pairs).items() if times > 1}

    def named(name: str, model: str) -> str:
        cls, _, rest = name.partition(" ")
        kernel, space, dtype = rest.partition(" ")
        return f"{cls} {kernel}/{model.removesuffix('_q')}{space}{dtype}" if name in shared else name

    return {(name, model): named(name, model) for name, model in pairs}


def even(labels: Any) -> Any:
    """Which labels have an even sha256."""
    import numpy

    unique, inverse = numpy.unique(labels, return_inverse=True)
    sides = numpy.array([hashlib.sha256(str(label).encode()).digest()[-1] % 2 == 0 for label in unique])
    return sides[inverse]


def sides(many: Sequence[Frame], split: str, chip: Chip) -> list[Any] | None:
    """Masks of the rows that are held out, one per frame; None where one side would be empty."""
    import numpy

    if split == "larger":
        middle = numpy.median(numpy.concatenate([bound(frame, chip) for frame in many]))
        masks = [bound(frame, chip) > middle for frame in many]
    else:
        labels = [frame.shape if split == "unseen_shape" else frame.llm for frame in many]
        masks = [even(label) for label in labels]
    held = sum(int(mask.sum()) for mask in masks)
    rows = sum(map(len, many))
    return masks if LEAST <= held <= rows - LEAST else None


def refits(gpu: str, classes: Iterable[str] | None = None) -> Iterator[Score]:
    """Scores of every family on every split that it allows."""
    chip = chip_of(gpu)
    groups = cleaned(frames(gpu, classes))
    names = distinct(groups)
    for (family, model), many in sorted(groups.items()):
        name = names[family, model]
        for split in ("unseen_shape", "unseen_model", "larger"):
            masks = sides(many, split, chip)
            held = HIDDEN.get(model, ()) if split == "larger" else ()
            note = f"{', '.join(held)} at the prior: hidden under overhead in the smaller half" if held else ""
            if masks is not None:
                training, rest = halves(many, [~mask for mask in masks]), halves(many, masks)
                yield _score(name, rest, chip, fit(training, chip, ROWS, held), split, note)
        donor = _donor(gpu, family, model)
        if donor is not None:
            yield _score(name, many, chip, dict(donor[1]), "other_framework", f"constants of {donor[0]}")


def _donor(gpu: str, name: str, model: str) -> tuple[str, Any] | None:
    """The constants of another framework's family of the same class, model and format."""
    cls, _, rest = name.partition(" ")
    framework, _, kernel = rest.partition("/")
    for (other, of), family in families(gpu).items():
        other_cls, _, other_rest = other.partition(" ")
        other_framework, _, other_kernel = other_rest.partition("/")
        same = (other_cls, of, other_kernel.rpartition(" ")[2]) == (cls, model, kernel.rpartition(" ")[2])
        if same and kernel and other_kernel and other_framework != framework:
            return other_rest, family.constants
    return None


def _score(name: str, many: Sequence[Frame], chip: Chip, constants: dict[str, float], split: str, note: str) -> Score:
    cls, _, rest = name.partition(" ")
    kernel, _, dtype = rest.rpartition(" ")
    figures = error_of(many, chip, constants)
    return Score(many[0].gpu, cls, dtype, kernel or dtype, split, None, **figures, constants=len(constants), note=note)
