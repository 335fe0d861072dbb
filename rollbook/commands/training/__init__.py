"""Verbs that start or change training."""
