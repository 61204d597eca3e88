"""Compression of a network in PyTorch, each method beside the edit of the model that it realises.

``--dtype int4-g128-asym`` says what such weights cost; ``gptq``, ``awq`` and ``round_to_nearest`` make them, and what they
store is what the format says, to the byte. ``--prune-width`` and ``--prune-depth`` say what a narrower network costs;
``minitron`` scores and cuts it, and ``distillation`` is the loss that heals it.
"""
