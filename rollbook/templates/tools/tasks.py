"""The tasks: one row for each question. The temperature is known to the tool only. `id` must be unique.

One question about each city is held out.
"""

from collections.abc import Iterator
from typing import Any


def tasks() -> Iterator[dict[str, Any]]:
    for held_out, city in ((2, "Oslo"), (5, "Cairo"), (3, "Lima")):
        for degrees in range(1, 7):
            yield {
                "id": f"{city}-{degrees}",
                "split": "test" if degrees == held_out else "train",
                "city": city,
                "degrees": degrees,
                "question": f"How many degrees are there in {city} ?",
            }
