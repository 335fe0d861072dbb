"""One file for each store."""
