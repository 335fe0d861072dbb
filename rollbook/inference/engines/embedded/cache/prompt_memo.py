"""Next-token logits of prompts seen under the current weights.

Episodes of one group, and of one world, ask the same short prompts again and again. For a request that needs a single token the
logits are all there is to know, so a repeated one costs no forward. Whoever changes the weights clears it.
"""

from collections.abc import Sequence

from torch import Tensor


class PromptMemo:
    """Least recently used goes first. Holds at most `capacity` rows."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def get(self, prompt: Sequence[int]) -> Tensor | None:
        key = tuple(prompt)
        logits_V = self._rows.pop(key, None)
        if logits_V is not None:
            self._rows[key] = logits_V
        return logits_V

    def put(self, prompt: tuple[int, ...], logits_V: Tensor) -> None:
        if not self._capacity:
            return
        if len(self._rows) >= self._capacity:
            del self._rows[next(iter(self._rows))]
        # A copy: a view would keep the logits of its whole forward alive, and the bound would mean nothing.
        self._rows[prompt] = logits_V.clone()

    def clear(self) -> None:
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)
