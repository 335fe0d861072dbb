"""Evaluations on held-out tasks: of a run while it trains, and of the command `rollbook eval`."""
