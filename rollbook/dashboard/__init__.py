"""Shows a run: the web page, the live terminal view and the plots."""
