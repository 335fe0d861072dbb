"""TELLING: metrics, events and spans."""
