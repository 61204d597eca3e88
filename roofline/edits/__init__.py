"""What-if edits: Model -> Model, chained in order.

Blocks are value objects, so an edit is a replacement of fields: the number of key-value heads, a window, a storage
format. An edit that finds nothing to change is an error, never a silent no-op.
"""

from roofline.edits.attention import (
    bidirectional,
    kv_heads,
    mla_rank,
    pattern,
    share_kv_every,
    swap_attention,
    unfused,
    window,
)
from roofline.edits.edit import Edit, apply
from roofline.edits.storage import dtype, kv_dtype
from roofline.edits.structure import experts, prune_depth, prune_width

__all__ = [
    "Edit",
    "apply",
    "bidirectional",
    "dtype",
    "experts",
    "kv_dtype",
    "kv_heads",
    "mla_rank",
    "pattern",
    "prune_depth",
    "prune_width",
    "share_kv_every",
    "swap_attention",
    "unfused",
    "window",
]
