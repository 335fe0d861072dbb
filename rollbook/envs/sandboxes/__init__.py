"""One file for each kind of process a sandbox is made of."""
