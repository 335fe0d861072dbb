"""Generators of the reference pages in docs/. They are not part of the package."""
