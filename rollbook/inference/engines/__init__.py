"""One file for each engine."""
