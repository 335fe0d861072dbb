"""The probe of the pass size: a pass without a batch, as large as the planned ones, before the first step of a run.

The memory of a pass is planned, and the plan is an estimate. The probe finds out before the first batch whether it fits, so that no
step is trained twice. The size that fits is recorded like a setting, because it decides the last bits of sums.
"""

import numpy as np

from rollbook.contracts.batch import PassSplit
from rollbook.contracts.group import GroupId
from rollbook.trainer.data.passes import Microbatch, pack, pad
from rollbook.trainer.data.rows import TrainRow

SEQUENCE_TOKENS = 1024
"""Length of the sequences of a probe; memory depends on their sum."""
MIN_TOKENS = 256
"""A smaller pass is not tried."""
MIN_UNCHECKPOINTED_TOKENS = 2048
"""Below it, recomputing the activations of all layers in a larger pass is faster."""


def probe_pass(num_tokens: int, *, vocabulary_size: int, context: int | None, is_packed: bool) -> Microbatch:
    """A pass of random tokens, all trained. With several sequences it may have a few tokens less. `context`: of the model."""
    count = -(-num_tokens // min(SEQUENCE_TOKENS, context or SEQUENCE_TOKENS))
    length = max(1, num_tokens // count)
    random = np.random.default_rng(0)
    rows = [_row(number, random.integers(vocabulary_size, size=length + 1, dtype=np.int32)) for number in range(count)]
    weights = [1.0 / (count * length)] * count
    if is_packed:
        return pack(rows, range(count), [0] * count, weights)
    return pad(rows, [[number] for number in range(count)], weights)


def _row(number: int, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> TrainRow:
    length = len(tokens) - 1
    return TrainRow(
        group_id=GroupId(f"probe-{number}"),
        sample=number,
        inputs=tokens[:-1],
        predicted_at=np.arange(length),
        targets=tokens[1:],
        sampled_logprobs=np.full(length, np.nan, dtype=np.float32),
        advantage=1.0,
        temperature=1.0,
        num_tokens=length + 1,
    )


def smaller_probe(split: PassSplit) -> PassSplit | None:
    """What to try after a pass of this size did not fit: half of the tokens, then checkpointing of all layers. None: nothing."""
    half = split.max_tokens // 2
    if split.checkpoints_all:
        return PassSplit.of(half, True) if half >= MIN_TOKENS else None
    if half >= MIN_UNCHECKPOINTED_TOKENS:
        return PassSplit.of(half, split.checkpointing)
    return PassSplit.of(max(split.max_tokens, MIN_TOKENS), True)
