"""SPEAKING: verbs."""
