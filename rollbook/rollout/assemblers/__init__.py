"""One file for each way turns become token rows."""
