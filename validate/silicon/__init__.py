"""Adapters from public operator measurements to frames whose every row carries the Cost of the models' own components."""
