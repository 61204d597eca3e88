"""Weights on disk: what the headers of a checkpoint say is stored, without reading a weight."""
