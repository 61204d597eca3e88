"""Speculative decoding: how many drafted tokens survive, what a round costs, and which draft length pays."""
