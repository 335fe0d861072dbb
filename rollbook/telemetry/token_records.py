"""Records of single tokens: the trainer's logprob, the entropy of the policy and the advantage, every k-th step.

`tokens/step-N.msgpack` of the run directory is a map from group, sample and sequence to three arrays with one value per token of
the sequence; NaN where nothing was trained. The files of old steps are deleted.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.decoding import msgpack_decoder
from rollbook.telemetry.events import FailureReport

FOLDER = "tokens"
FILE = re.compile(r"step-(\d+)\.msgpack")

Key = tuple[str, int, int]
"""Group id, number of the sample, number of its sequence."""


class TokenArrays(msgspec.Struct, frozen=True, array_like=True):
    """Little-endian float32 arrays of equal length."""

    logprob: bytes
    entropy: bytes
    advantage: bytes

    @classmethod
    def of(cls, logprob: NDArray[Any], entropy: NDArray[Any], advantage: NDArray[Any]) -> "TokenArrays":
        return cls(*(np.ascontiguousarray(array, dtype="<f4").tobytes() for array in (logprob, entropy, advantage)))


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one sequence. NaN: not trained."""

    step: int
    logprob: list[float]
    entropy: list[float]
    advantage: list[float]


class TokenRecordWriter:
    """Writes the records of every `every`-th step and keeps the newest `kept` files."""

    def __init__(self, run_dir: Path, *, every: int, kept: int) -> None:
        self._folder = run_dir / FOLDER
        self._every = every
        self._kept = kept
        self._failure = FailureReport("token records are not written")

    def is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def write(self, step: int, rows: Mapping[Key, TokenArrays]) -> None:
        """A failure is reported once and does not stop training."""
        try:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"step-{step}.msgpack"
            draft = path.with_name(f".{path.name}")
            draft.write_bytes(msgspec.msgpack.encode({_key(*key): arrays for key, arrays in rows.items()}))
            draft.replace(path)
            for old in recorded_steps(self._folder.parent)[: -self._kept]:
                (self._folder / f"step-{old}.msgpack").unlink(missing_ok=True)
        except OSError as error:
            self._failure.report(error)


def recorded_steps(run_dir: Path) -> list[int]:
    """The steps with records, oldest first."""
    found = (FILE.fullmatch(path.name) for path in (run_dir / FOLDER).glob("step-*.msgpack"))
    return sorted(int(match[1]) for match in found if match)


def read_token_record(run_dir: Path, step: int, group_id: str, sample: int, sequence: int) -> TokenRecord | None:
    """The record of one sequence; None if there is none, or if its file is damaged."""
    try:
        # The other sequences are not decoded.
        rows = msgpack_decoder(dict[str, msgspec.Raw]).decode((run_dir / FOLDER / f"step-{step}.msgpack").read_bytes())
        found = rows.get(_key(group_id, sample, sequence))
        if found is None:
            return None
        arrays = msgpack_decoder(TokenArrays).decode(found)
        logprob, entropy, advantage = (
            np.frombuffer(raw, "<f4").astype(float).round(5).tolist()
            for raw in (arrays.logprob, arrays.entropy, arrays.advantage)
        )
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    return TokenRecord(step=step, logprob=logprob, entropy=entropy, advantage=advantage)


def _key(group_id: str, sample: int, sequence: int) -> str:
    return f"{sample}/{sequence}/{group_id}"
