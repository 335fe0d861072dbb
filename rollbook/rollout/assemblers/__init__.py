"""Assemblers make token rows from the turns of an episode."""
