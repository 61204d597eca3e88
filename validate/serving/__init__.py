"""Whole servers against measurements: cleaned rows, the closed form over the calibrated kernels, fits and errors."""
