"""Datasets, cursor and curriculum: which task is drawn next."""
