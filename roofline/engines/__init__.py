"""Engines: what vLLM, SGLang, TensorRT-LLM and llama.cpp allocate, as sourced numbers, and how they lay out state."""
