"""Heavy compression (DeepSeek-V4): blocks of many tokens, without overlap, pooled into one entry each.

The kernel of ``csa_compress`` with one series of projections; a block is too long for registers, so that its softmax runs.
"""

from __future__ import annotations

from roofline.kernels.csa_compress import TOLERANCE as POOLED
from roofline.kernels.csa_compress import Pooling, compress, expected, inputs, launch, reference
from roofline.kernels.spec import Build, Spec

CASES = (
    Pooling("prefill", "bf16", ((70, 0), (32, 0), (5, 0)), 40, 32, False, 8, page=2),
    Pooling("chunk", "bf16", ((40, 19), (1, 6), (25, 14)), 24, 7, False, 6, page=3),
    Pooling("decode", "bf16", ((1, 32), (1, 10), (1, 0), (1, 21)), 600, 11, False, 32),
    Pooling("half", "fp16", ((57, 3),), 20, 13, False, page=2),
    Pooling("single", "fp32", ((5, 4), (12, 1), (4, 0)), 36, 9, False, 4, page=4),
    Pooling("every-token", "bf16", ((6, 3),), 16, 1, False, 4, page=4),
)
TOLERANCE = {name: POOLED[name] for name in ("bf16", "fp16", "fp32")}
BUILDS = (
    Build(Pooling("v4-prefill", "bf16", ((8192, 0),), 512, 128, False, 64, page=64)),
    Build(Pooling("wide-decode", "bf16", ((1, 32),) * 64, 600, 11, False, 32)),
)
MEASURED = (
    Pooling("v4-prefill-32k", "bf16", ((32768, 0),), 512, 128, False, 64, page=64),
    Pooling("v4-decode-128", "bf16", ((1, 4095),) * 128, 512, 128, False, 64, page=64),
)
SPEC = Spec(
    "hca_compress", "CompressWrite", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED,
    timed=lambda case, tensors: compress(**tensors),
)  # fmt: skip
