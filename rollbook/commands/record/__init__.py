"""Verbs that read or use what a run recorded."""
