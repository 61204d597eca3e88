"""The reader of every dense decoder family: guard, style, and what a family's irregular keys need."""

from __future__ import annotations

from dataclasses import replace

from roofline.configs.config import Config
from roofline.configs.dense import build
from roofline.configs.guard import left_out, refuse_unread
from roofline.configs.readers.irregular import ADJUST
from roofline.configs.storage import Storage
from roofline.configs.styles import STYLES
from roofline.model import Model


def read_dense(config: Config, storage: Storage, name: str) -> Model:
    """A dense decoder in the style of its model_type.

    Raises UnsupportedModel where the config switches on a feature that the family's style does not read.
    """
    family = config.text("model_type")
    style = STYLES[family]
    read = refuse_unread(config, family, style.keys, windows=style.windows)
    model = ADJUST[family](read, style, storage, name) if family in ADJUST else build(read, style, storage, name)
    return replace(model, assumes=tuple(config.assumes), not_modelled=left_out(config))
