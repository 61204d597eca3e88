"""Serving: what stands between kernels and users, from blocks of cache to requests."""
