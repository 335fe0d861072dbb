"""The tasks: one row for each question. The temperature is known to the tool only. `id` must be unique."""

from collections.abc import Iterator
from typing import Any


def tasks() -> Iterator[dict[str, Any]]:
    for city in ("Oslo", "Cairo", "Lima"):
        for degrees in range(1, 7):
            yield {
                "id": f"{city}-{degrees}",
                "city": city,
                "degrees": degrees,
                "question": f"How many degrees are there in {city} ?",
            }
