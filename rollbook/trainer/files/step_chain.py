"""`steps.jsonl`: the trainer's own record of its steps, with which an audit compares the ledger.

One line for each acknowledged step: digests of its batch and of its weights, and numbers of groups. Each line contains a digest of
the line before it, so that a missing or changed line is found. A step that was trained again after a restart has a line for each
epoch. The file is written after the ledger's acknowledgement and before the checkpoint of the step: a ledger that does not know a
step of this file has lost it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.group import GroupId

FILE_NAME = "steps.jsonl"


class ChainedStep(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    epoch: int
    weights: str
    """Digest of the weights after the step."""
    batch: str
    """Digest of the manifest."""
    groups: int
    unusable: int
    trained: int
    """Groups of all batches up to this one."""
    chain: str = ""
    """Digest of the chain before this line and of the other fields."""

    def linked(self, before: str) -> "ChainedStep":
        unlinked = msgspec.structs.replace(self, chain="")
        digest = blake2b(before.encode() + msgspec.json.encode(unlinked), digest_size=16).hexdigest()
        return msgspec.structs.replace(self, chain=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChain:
    steps: tuple[ChainedStep, ...] = ()
    """In the order in which they were written."""
    faults: tuple[str, ...] = ()
    length: int = 0
    """Bytes of the complete lines."""

    @property
    def last_step(self) -> int:
        return max((line.step for line in self.steps), default=0)

    def trained_before(self, step: int) -> int:
        """Groups of all batches before this one."""
        return next((line.trained for line in reversed(self.steps) if line.step == step - 1), 0)


def read_chain(directory: Path) -> StepChain:
    """The chain of a run directory; empty if it has none. An incomplete last line is ignored."""
    path = directory / FILE_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return StepChain()
    steps: list[ChainedStep] = []
    faults: list[str] = []
    before, length = "", content.rfind(b"\n") + 1
    for number, line in enumerate(content[:length].splitlines(), start=1):
        try:
            step = json_decoder(ChainedStep).decode(line)
        except msgspec.MsgspecError as error:
            faults.append(f"{FILE_NAME}: line {number} is damaged: {error}")
            continue
        if step.linked(before) != step:
            faults.append(f"{FILE_NAME}: line {number} (step {step.step}) does not continue the line before it")
        before = step.chain
        steps.append(step)
    return StepChain(steps=tuple(steps), faults=tuple(faults), length=length)


class StepChainWriter:
    """Continues the chain of a run directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._chain: StepChain | None = None
        self._last = ""
        self._trained = 0

    def add(self, manifest: BatchManifest, *, epoch: int, weights: str, unusable: Mapping[GroupId, str]) -> None:
        """Append a step and sync it to the disk."""
        if self._chain is None:
            self._chain = read_chain(self._path.parent)
            self._last = self._chain.steps[-1].chain if self._chain.steps else ""
            self._trained = self._chain.trained_before(manifest.step)
            if self._path.exists():
                os.truncate(self._path, self._chain.length)
        self._trained += len(manifest.entries)
        step = ChainedStep(
            step=manifest.step,
            epoch=epoch,
            weights=weights,
            batch=manifest.digest,
            groups=len(manifest.entries),
            unusable=len(unusable),
            trained=self._trained,
        ).linked(self._last)
        self._last = step.chain
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(step) + b"\n")
            file.flush()
            os.fsync(file.fileno())
