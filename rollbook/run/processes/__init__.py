"""One module per operating-system process. Each builds its concrete parts from the config."""
