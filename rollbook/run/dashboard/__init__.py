"""The dashboard of a run: where its data comes from, and its process."""
