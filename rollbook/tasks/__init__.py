"""WHAT TO DO NEXT: datasets, cursor, curriculum."""
