"""Expected time: the datasheet bound with a few fitted physical terms. Constants come from ``validate calibrate``."""
