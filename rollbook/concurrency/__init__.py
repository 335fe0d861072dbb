"""WAITING: how the project starts, waits and stops."""
