"""LOOKING: what a person sees of a run: terminal, plots, later the page."""
