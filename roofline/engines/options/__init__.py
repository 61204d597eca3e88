"""The documented options of each engine's server, one file per engine."""
