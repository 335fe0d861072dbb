"""Adapters of remote sandboxes to their providers, each by the official package."""
