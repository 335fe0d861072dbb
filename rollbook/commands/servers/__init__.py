"""Verbs that serve one part without a run."""
