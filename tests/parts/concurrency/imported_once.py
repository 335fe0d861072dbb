"""Imported by process templates under test: a child in which it is imported was forked."""

import numpy as np

np.random.random()
