"""The kernels' tests run in Triton's interpreter, which must be chosen before triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
