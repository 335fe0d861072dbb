"""Runs code that is not trusted, such as a model's: one protocol, confined by bubblewrap."""
