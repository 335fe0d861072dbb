"""Interpreter settings for a process with a thread that launches GPU work."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0005
"""Thread switch interval: a tenth of Python's default."""
YOUNG_OBJECTS = 20_000
"""New objects between two collections of garbage: Python's default is 700."""


@contextmanager
def prompt_launches() -> Iterator[None]:
    """The launching thread must not wait long, neither for the interpreter, which other threads use, nor for a collection of
    garbage, which would search all objects of the loaded libraries."""
    switch_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
