"""Operating a cloud through its command line."""
