"""Verbs that check a configuration, a machine or a rollout."""
