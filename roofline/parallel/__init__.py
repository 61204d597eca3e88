"""Parallelism: a mesh of devices, the part of a model that each rank holds, and what the ranks say to each other."""
