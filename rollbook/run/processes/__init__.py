"""One file for each operating-system process; each builds concrete parts from config."""
