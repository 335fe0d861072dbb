"""Who did what when: intervals of spans, their union, and how many ran at once."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.dashboard.tail import FolderTail
