"""WIRING: the only place where rooms meet."""
