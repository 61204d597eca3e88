"""roofline: what will model M do on hardware H, why, and can I believe it?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roofline.accelerator import Accelerator as Accelerator
    from roofline.accelerator import load_accelerator as load_accelerator
    from roofline.configs.load import load_model as load_model
    from roofline.errors import InputError as InputError
    from roofline.errors import RooflineError as RooflineError
    from roofline.errors import UnsupportedModel as UnsupportedModel
    from roofline.inference import Deployment as Deployment
    from roofline.model import Model as Model
    from roofline.work import Ragged as Ragged
    from roofline.work import Work as Work

__version__ = "0.1.0"

# A ZIP archive or an sdist has no links roofline/{hardware,kernels,validate}: there they are found beside this folder.
if not os.path.isdir(os.path.join(__path__[0], "hardware")):
    __path__.append(os.path.dirname(__path__[0]))

_HOMES = {
    "Accelerator": "roofline.accelerator",
    "Deployment": "roofline.inference",
    "InputError": "roofline.errors",
    "Model": "roofline.model",
    "Ragged": "roofline.work",
    "RooflineError": "roofline.errors",
    "UnsupportedModel": "roofline.errors",
    "Work": "roofline.work",
    "load_accelerator": "roofline.accelerator",
    "load_model": "roofline.configs.load",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that a command pays only for what it needs."""
    if name not in _HOMES:
        raise AttributeError(f"module 'roofline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, whether they were used yet or not."""
    return sorted({*globals(), *_HOMES})
