"""A pass or a step that does not fit into memory: what failed, and what to try next."""

from collections.abc import Sequence

from rollbook.contracts.batch import PassSplit
from rollbook.contracts.errors import RunError
from rollbook.trainer.data.minibatches import Minibatch, smaller_split
from rollbook.trainer.data.probe import smaller_probe

LESS_MEMORY = (
    "Leave it more memory, set trainer.lora, trainer.optimizer_state = 'host', a smaller trainer.max_logits_mb or more"
    " trainer.ranks, or train shorter sequences, and start it again: it resumes"
)


class PassMemoryError(Exception):
    """A pass did not fit into the memory of this rank. Its gradients are freed."""

    def __init__(self, detail: str, *, is_updated: bool = False, is_optimizer: bool = False) -> None:
        super().__init__(detail)
        self.is_updated = is_updated
        """An earlier minibatch of the step changed the weights."""
        self.is_optimizer = is_optimizer
        """The state of the optimizer did not fit: smaller passes do not help."""


class StepMemoryError(RunError):
    """A step did not fit into memory with the split `failed`."""

    def __init__(self, text: str, *, step: int, failed: PassSplit, smaller: PassSplit | None, can_retry: bool) -> None:
        super().__init__(text)
        self.step = step
        self.failed = failed
        self.smaller = smaller
        """What to try next; None: nothing smaller is possible."""
        self.can_retry = can_retry
        """The learner is as it was before the step. Otherwise it must be restored from a checkpoint."""


def step_error(
    error: PassMemoryError,
    minibatches: Sequence[Minibatch],
    *,
    step: int,
    split: PassSplit,
    process: str,
    optimizer_bytes: int,
    can_repeat: bool,
) -> StepMemoryError:
    """What to do about a step that does not fit into the memory of `process`."""
    smaller = None if error.is_optimizer else smaller_split(split, minibatches)
    text = f"step {step} does not fit into the memory of {process} with {split}"
    if error.is_optimizer:
        text = f"the state of the optimizer ({optimizer_bytes / 1e9:.2f} GB) does not fit into the memory of {process}"
    if smaller is None:
        longest = max((part.longest for part in minibatches), default=0)
        if longest and not error.is_optimizer:
            text += f". Its longest sequence has {longest} tokens"
        text += f". {LESS_MEMORY}"
    return StepMemoryError(
        f"{text}. {error}", step=step, failed=split, smaller=smaller, can_retry=can_repeat and not error.is_updated
    )


def trial_error(error: PassMemoryError, *, split: PassSplit, process: str, can_repeat: bool) -> StepMemoryError:
    """What to do about a trial pass that does not fit into the memory of `process`."""
    smaller = smaller_probe(split)
    advice = "" if smaller is not None else f". {LESS_MEMORY}"
    return StepMemoryError(
        f"a trial pass does not fit into the memory of {process} with {split}{advice}. {error}",
        step=0,
        failed=split,
        smaller=smaller,
        can_retry=can_repeat,
    )
