"""Tasks in Harbor's published format: read, built into an image of a sandbox, verified."""
