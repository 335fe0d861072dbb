"""One file for each way in which turns become token rows."""
