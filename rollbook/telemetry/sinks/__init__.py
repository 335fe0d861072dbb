"""One file for each place metrics can be shown, and the only one that imports its library."""
