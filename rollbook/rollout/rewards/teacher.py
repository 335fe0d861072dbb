"""`Teacher`: the log-probabilities that another model gives to the tokens that the policy sampled, for distillation.

The server is any with `/completions`, token ids as prompt and `echo`: `rollbook policy serve`, or vLLM. The scores are stored with
the sample, so a replay needs no teacher. A teacher with other token ids would score other text: it is refused.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from rollbook.concurrency.retry import backoff
from rollbook.contracts.decoding import load_json
from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import MIN_LOGPROB, RolloutSample
from rollbook.rollout.contract import Tokenizer
from rollbook.rollout.settings import TeacherSettings

PROBE = (
    'The quick brown fox: 0123456789 + 3.14 = "x" {"a": [1, 2]} <tool_call> </think> '
    "def f(x):\n    return x\n\tÄrger, naïve, 東京, Москва, مرحبا, 🙂\n\n  two  spaces"
)
"""Text of many kinds, whose token ids must be the same in both tokenizers."""


class TeacherError(Exception):
    """The teacher gave no scores."""


class Teacher:
    def __init__(self, settings: TeacherSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self._slots = asyncio.Semaphore(settings.concurrent)
        self._headers = {}
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if not key:
                raise RunError(f"rollout.teacher.api_key_env: the variable {settings.api_key_env} is not set")
            self._headers["Authorization"] = f"Bearer {key}"

    async def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises `RunError` if the teacher encodes a text to other ids."""
        try:
            answer = await self._ask(prompt=PROBE, add_special_tokens=False, return_tokens_as_token_ids=True)
            found = [int(name.removeprefix("token_id:")) for name in answer["choices"][0]["logprobs"]["tokens"]]
        except (TeacherError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"rollout.teacher: {self._settings.url} does not score prompts ({error}); it must support /completions with echo,"
                " logprobs and return_tokens_as_token_ids"
            ) from error
        expected = tokenizer.encode(PROBE)
        if found != expected:
            at = next(
                (n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
                min(len(found), len(expected)),
            )
            raise RunError(
                f"rollout.teacher: the model {self._settings.model} has another tokenizer than the policy: token {at} of a text"
                f" is {found[at : at + 1]} there and {expected[at : at + 1]} here. A teacher must have the policy's token ids"
            )

    async def score(self, sample: RolloutSample) -> RolloutSample:
        """The sample with the teacher's log-probability of each trained token; unscorable if the teacher fails."""
        if not sample.is_scorable:
            return sample
        rows = []
        for row in sample.sequences:
            if not row.num_trained:
                rows.append(row)
                continue
            try:
                scores = await self._scores(row.token_ids.tolist())
            except TeacherError as error:
                cause = f"teacher {self._settings.model} at {self._settings.url}: {error}"
                return replace(sample, reward=None, invalid_cause=cause)
            rows.append(row.with_columns(teacher_logprobs=np.where(row.loss_mask, scores, np.nan)))
        return replace(sample, sequences=tuple(rows))

    async def _scores(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        answer = await self._ask(prompt=list(token_ids))
        try:
            given = answer["choices"][0]["logprobs"]["token_logprobs"]
            scores = np.array([np.nan if score is None else float(score) for score in given], dtype=np.float64)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TeacherError(f"the answer has no logprobs ({type(error).__name__}: {error})") from None
        if len(scores) < len(token_ids) or np.isnan(scores[1 : len(token_ids)]).any():
            raise TeacherError(f"{len(scores)} scores for {len(token_ids)} tokens, or some of them are missing")
        return np.clip(scores[: len(token_ids)], MIN_LOGPROB, 0.0)

    async def _ask(self, **fields: Any) -> Any:
        body = {
            "model": self._settings.model,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
            "temperature": 1.0,
            **fields,
        }
        waits = backoff(first_s=self._settings.first_wait_s, max_s=30.0)
        for attempt in range(1, self._settings.attempts + 1):
            try:
                async with (
                    self._slots,
                    self._session.post(
                        self._settings.url.rstrip("/") + "/completions",
                        json=body,
                        headers=self._headers,
                        timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
                    ) as response,
                ):
                    raw = await response.read()
                    if response.status == 200:
                        return load_json(raw.decode())
                    failure = f"status {response.status}: {raw.decode(errors='replace')[:300]}"
                    if response.status < 500 and response.status not in (408, 425, 429):
                        break
            except TimeoutError:
                failure = f"no answer within {self._settings.timeout_s:g} s"
            except (aiohttp.ClientError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
            if attempt < self._settings.attempts:
                await asyncio.sleep(next(waits))
        raise TeacherError(failure)


@asynccontextmanager
async def open_teacher(settings: TeacherSettings, tokenizer: Tokenizer) -> AsyncIterator[Teacher]:
    """Raises `RunError` if the teacher cannot score the policy's tokens."""
    async with aiohttp.ClientSession(trust_env=True) as session:
        teacher = Teacher(settings, session)
        await teacher.check_tokenizer(tokenizer)
        yield teacher
