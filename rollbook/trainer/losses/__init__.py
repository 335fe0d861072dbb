"""One file for each family of losses."""
