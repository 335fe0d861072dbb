"""Metrics, events and spans."""
