"""Teachers: the log-probabilities that another model gives to the tokens that the policy sampled, for distillation.

The server is any with `/completions`, token ids as prompt and `echo`: `rollbook policy serve`, or vLLM. The scores are stored with
the sample, so a replay needs no teacher. A teacher with other token ids would score other text: it is refused.

The policy can be its own teacher, with a context that it did not see when it sampled. Each gap then compares one version with and
without the context: the version that sampled the token, or the server's, if it has newer weights by now.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from rollbook.concurrency.retry import backoff
from rollbook.contracts.decoding import load_json
from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import MIN_LOGPROB, RolloutSample, TokenRow
from rollbook.rollout.contract import RenderError, Tokenizer
from rollbook.rollout.policy import current_episode
from rollbook.rollout.rewards.judges import connect_failure
from rollbook.rollout.rewards.scorer import JUDGES_FACT
from rollbook.rollout.rewards.teacher_scores import ScoreStore, SequenceScores
from rollbook.rollout.settings import TeacherSettings

PROBE = (
    'The quick brown fox: 0123456789 + 3.14 = "x" {"a": [1, 2]} <tool_call> </think> '
    "def f(x):\n    return x\n\tÄrger, naïve, 東京, Москва, مرحبا, 🙂\n\n  two  spaces"
)
"""Text of many kinds, whose token ids must be the same in both tokenizers."""
COMPARED_IDS = 256
"""Ids that are compared with one request, where two vocabularies differ."""
ID_PREFIX = "token_id:"
REMEDY = "use a teacher with the policy's tokenizer: of the same family, or trained from the same base model"


class TeacherError(Exception):
    """The teacher gave no scores."""


class TeacherUnreachableError(TeacherError):
    """Nothing answered at the teacher's URL."""


class Teacher:
    """One model. Requests for the same content that are made at the same time share one answer."""

    def __init__(
        self,
        settings: TeacherSettings,
        session: aiohttp.ClientSession,
        tokenizer: Tokenizer,
        stored: ScoreStore,
        *,
        url: str,
        token: str | None = None,
    ) -> None:
        """`url`: up to and including `/v1`. `token`: of the policy server, for the policy as its own teacher."""
        self._settings = settings
        self._session = session
        self._tokenizer = tokenizer
        self._stored = stored
        self._url = url.rstrip("/")
        self._slots = asyncio.Semaphore(settings.concurrent)
        self._asked: dict[str, asyncio.Task[SequenceScores]] = {}
        self._context = None if settings.context is None else Template(settings.context)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.name = "the policy" if settings.policy else f"teacher {settings.model} at {url}"
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if not key:
                raise RunError(f"rollout.teacher.api_key_env: the variable {settings.api_key_env} is not set")
            self._headers["Authorization"] = f"Bearer {key}"

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether it teaches a task with this row."""
        return all(name in row and fnmatchcase(_text(row[name]), want) for name, want in self._settings.tasks.items())

    async def check_tokenizer(self) -> None:
        """Raises `RunError` if the teacher gives another meaning to the policy's token ids."""
        if self._settings.policy:
            return
        try:
            answer = await self._complete(
                prompt=PROBE, add_special_tokens=False, return_tokens_as_token_ids=True, logprobs=1
            )
            found = [int(name.removeprefix(ID_PREFIX)) for name in answer["choices"][0]["logprobs"]["tokens"]]
        except TeacherUnreachableError as error:
            raise RunError(
                f"rollout.teacher: nothing answers at {self._url} ({error}): start the teacher's server, such as `rollbook policy "
                "serve --model DIR --port PORT`, or correct url"
            ) from error
        except (TeacherError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"rollout.teacher: {self._url} does not score prompts ({error}); it must support /completions with echo,"
                " logprobs and return_tokens_as_token_ids"
            ) from error
        expected = self._tokenizer.encode(PROBE)
        if found != expected:
            at = next(
                (n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
                min(len(found), len(expected)),
            )
            raise self._refusal(
                f"token {at} of a text is {found[at : at + 1]} there and {expected[at : at + 1]} here. A teacher must have the"
                f" policy's token ids: {REMEDY}"
            )
        if self._settings.tokenizer_check == "digest":
            await self._compare_digests()

    async def _compare_digests(self) -> None:
        """vLLM gives no digest of its vocabulary. Of its tokenizer, only the ids of the text are compared."""
        try:
            info = await self._request("GET", "/tokenizer_info")
        except TeacherError:
            return
        digest = info.get("vocabulary_digest") if isinstance(info, dict) else None
        own = self._tokenizer.vocabulary_digest
        if digest is None or digest == own:
            return
        raise self._refusal(
            f"the digest of its vocabulary is {str(digest)[:12]}, that of the policy {own[:12]}: {await self._difference()}."
            f" Please {REMEDY}. If the policy never samples tokens that differ, set rollout.teacher.tokenizer_check ="
            ' "text"'
        )

    async def _difference(self) -> str:
        """The first id with another text."""
        for start in range(0, self._tokenizer.vocab_size, COMPARED_IDS):
            ids = range(start, min(start + COMPARED_IDS, self._tokenizer.vocab_size))
            try:
                if await self._decoded(ids) == self._tokenizer.decode(ids, skip_special_tokens=False):
                    continue
                for one in ids:
                    there = await self._decoded([one])
                    here = self._tokenizer.decode([one], skip_special_tokens=False)
                    if there != here:
                        return f"id {one} is {there!r} there and {here!r} here"
            except TeacherError:
                return f"the teacher has no id {ids[0]} or above"
        return "the teacher has more tokens than the policy"

    async def _decoded(self, ids: Sequence[int]) -> str:
        answer = await self._request("POST", "/detokenize", model=self._settings.model, tokens=list(ids))
        return str(answer.get("prompt")) if isinstance(answer, dict) else ""

    def _refusal(self, difference: str) -> RunError:
        return RunError(
            f"rollout.teacher: the model {self._settings.model} has another tokenizer than the policy: {difference}"
        )

    async def score(self, row: Mapping[str, Any], sample: RolloutSample) -> RolloutSample:
        """The sample with the teacher's scores of each trained token; unscorable if the teacher fails."""
        try:
            context = self._context_ids(row, sample)
            # At temperature 0 the recorded logprobs are those at temperature 1.
            is_plain = sample.sampling.temperature in (0.0, 1.0) and not sample.is_renormalised
            sequences = [
                await self._taught(sequence, context, is_plain=is_plain) if sequence.num_trained else sequence
                for sequence in sample.sequences
            ]
        except TeacherError as error:
            return replace(sample, reward=None, invalid_cause=f"{self.name}: {error}")
        return replace(sample, sequences=tuple(sequences))

    def _context_ids(self, row: Mapping[str, Any], sample: RolloutSample) -> list[int]:
        if self._context is None:
            return []
        notes = sample.facts.get(JUDGES_FACT, {})
        said = [note for judged in notes.values() for note in judged if note.get("score") is not None]
        feedback = [str(note.get("text", "")) for note in said]
        known = {name: _text(value) for name, value in row.items()}
        known |= {"feedback": "\n".join(filter(None, feedback)), "reward": f"{sample.reward:g}"}
        try:
            text = self._context.substitute(known)
        except KeyError as error:
            raise TeacherError(
                f"the context names ${error.args[0]}, and the task has the fields {', '.join(row)}"
            ) from None
        if self._settings.context_role is None:
            return self._tokenizer.encode(text)
        message = {"role": self._settings.context_role, "content": text}
        try:
            rendered = self._tokenizer.encode(self._tokenizer.render([message], add_generation_prompt=False))
        except RenderError as error:
            raise TeacherError(f"the context cannot be a message of role {message['role']!r}: {error}") from None
        start = self._start_ids()
        return rendered[len(start) :] if start and rendered[: len(start)] == start else rendered

    def _start_ids(self) -> list[int]:
        """The start token of the model, if it has one. A sequence that begins with it keeps it in front of the context."""
        return self._tokenizer.encode_prompt("")[:1]

    async def _taught(self, row: TokenRow, context: Sequence[int], *, is_plain: bool) -> TokenRow:
        """`is_plain`: the recorded logprobs are at temperature 1 and over the whole vocabulary, like those of the server."""
        ids = row.token_ids.tolist()
        start = len(self._start_ids()) if context and ids[:1] == self._start_ids() else 0
        asked = [*ids[:start], *context, *ids[start:]]
        found = (await self._scores(asked)).without(start, start + len(context))
        logprobs: NDArray[Any] = found.logprobs
        is_comparable = is_plain and not (row.loss_mask & (row.versions != found.version)).any()
        if self._settings.policy and not is_comparable:
            found, plain = await self._at_one_version(asked, ids)
            found = found.without(start, start + len(context))
            gaps = found.logprobs - plain.logprobs
            is_same = is_plain & (row.versions == found.version)
            logprobs = np.where(is_same, found.logprobs, row.logprobs + gaps)
        columns = {
            "teacher_logprobs": np.where(row.loss_mask, np.clip(logprobs, MIN_LOGPROB, 0.0), np.nan),
        }
        if found.top_ids is not None and found.top_logprobs is not None:
            is_trained = row.loss_mask[:, np.newaxis]
            columns["teacher_top_ids"] = np.where(is_trained, found.top_ids, -1)
            columns["teacher_top_logprobs"] = np.where(is_trained, found.top_logprobs, np.nan)
        return row.with_columns(**columns)

    async def _at_one_version(self, asked: Sequence[int], ids: Sequence[int]) -> tuple[SequenceScores, SequenceScores]:
        """The scores with and without the context. Weights may change between the two requests; then both are repeated."""
        for _ in range(self._settings.attempts):
            found, plain = await self._scores(asked), await self._scores(ids)
            if found.version == plain.version:
                return found, plain
        raise TeacherError(
            f"its weights changed between the scores with and without the context, {self._settings.attempts} times: raise"
            " rollout.teacher.attempts"
        )

    async def _scores(self, token_ids: Sequence[int]) -> SequenceScores:
        if self._settings.policy:
            return await self._ask(token_ids)  # depends on the weights of the moment
        content = json.dumps([self._url, self._settings.model, self._settings.top_k, list(token_ids)])
        key = hashlib.sha256(content.encode()).hexdigest()
        if (stored := self._stored.find(key)) is not None:
            return stored
        if (asked := self._asked.get(key)) is None:
            asked = asyncio.create_task(self._ask_and_store(key, token_ids), name="teacher.scores")
            self._asked[key] = asked
            asked.add_done_callback(lambda _: self._asked.pop(key, None))
        # The answer is stored even if the episode that asked for it is cancelled.
        return await asyncio.shield(asked)

    async def _ask_and_store(self, key: str, token_ids: Sequence[int]) -> SequenceScores:
        scores = await self._ask(token_ids)
        self._stored.add(key, scores)
        return scores

    async def _ask(self, token_ids: Sequence[int]) -> SequenceScores:
        top_k, count = self._settings.top_k, len(token_ids)
        fields: dict[str, Any] = {"return_tokens_as_token_ids": True} if top_k else {}
        if self._settings.policy and (episode := current_episode()) is not None:
            fields["min_publication"] = episode.min_publication
        answer = await self._complete(prompt=list(token_ids), logprobs=max(1, top_k), **fields)
        try:
            block = answer["choices"][0]["logprobs"]
            scores = np.array([np.nan if s is None else float(s) for s in block["token_logprobs"]], dtype=np.float32)
            tops = self._tops(block["top_logprobs"], count) if top_k else (None, None)
            version = block.get("prompt_version")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TeacherError(f"the answer has no logprobs ({type(error).__name__}: {error})") from None
        if self._settings.policy and version is None:
            raise TeacherError("the policy server does not report the version that scored")
        if len(scores) < count or np.isnan(scores[1:count]).any():
            raise TeacherError(f"{len(scores)} scores for {count} tokens, or some of them are missing")
        logprobs = np.clip(scores[:count], MIN_LOGPROB, 0.0)
        return SequenceScores(logprobs=logprobs, top_ids=tops[0], top_logprobs=tops[1], version=version)

    def _tops(
        self, given: Sequence[Mapping[str, float] | None], num_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """The answer may have one more token than requested: the sampled one. Ids that the policy does not have are left out."""
        ids = np.full((num_tokens, self._settings.top_k), -1, dtype=np.int32)
        logprobs = np.full(ids.shape, np.nan, dtype=np.float16)
        size = self._tokenizer.vocab_size
        for at, alternatives in enumerate(given[:num_tokens]):
            named = [(int(name.removeprefix(ID_PREFIX)), float(score)) for name, score in (alternatives or {}).items()]
            best = sorted((one for one in named if one[0] < size and one[1] >= MIN_LOGPROB), key=lambda one: -one[1])
            for column, (token, score) in enumerate(best[: self._settings.top_k]):
                ids[at, column], logprobs[at, column] = token, min(score, 0.0)
        if num_tokens > 1 and (ids[1:, 0] < 0).any():
            raise ValueError(f"token {1 + int((ids[1:, 0] < 0).argmax())} has no likeliest tokens")
        return ids, logprobs

    async def _complete(self, **fields: Any) -> Any:
        model = {} if self._settings.model is None else {"model": self._settings.model}
        body = {**model, "max_tokens": 0, "echo": True, "temperature": 1.0, **fields}
        return await self._request("POST", "/v1/completions", **body)

    async def _request(self, method: str, path: str, **body: Any) -> Any:
        """Paths without `/v1` are those of the server itself."""
        url = self._url + path.removeprefix("/v1") if path.startswith("/v1") else self._url.removesuffix("/v1") + path
        waits = backoff(first_s=self._settings.first_wait_s, max_s=30.0)
        is_reached = False
        for attempt in range(1, self._settings.attempts + 1):
            try:
                async with (
                    self._slots,
                    self._session.request(
                        method,
                        url,
                        json=body or None,
                        headers=self._headers,
                        timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
                    ) as response,
                ):
                    is_reached = True
                    raw = await response.read()
                    if response.status == 200:
                        return load_json(raw.decode())
                    failure = f"status {response.status}: {raw.decode(errors='replace')[:300]}"
                    if response.status < 500 and response.status not in (408, 425, 429):
                        break
            except TimeoutError:
                failure = f"no answer within {self._settings.timeout_s:g} s"
            except aiohttp.ClientConnectorError as error:
                failure = connect_failure(error)
            except (aiohttp.ClientError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
            if attempt < self._settings.attempts:
                await asyncio.sleep(next(waits))
        raise (TeacherError if is_reached else TeacherUnreachableError)(failure)

    async def close(self) -> None:
        pending = list(self._asked.values())
        for asked in pending:
            asked.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


class Teachers:
    """The teachers of a run. Each task has the first one that fits it, or none."""

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        self._teachers = teachers

    async def score(self, row: Mapping[str, Any], sample: RolloutSample) -> RolloutSample:
        teacher = next((one for one in self._teachers if one.fits(row)), None)
        return sample if teacher is None or not sample.is_scorable else await teacher.score(row, sample)


@asynccontextmanager
async def open_teachers(
    settings: Sequence[TeacherSettings],
    tokenizer: Tokenizer,
    *,
    store: Path | None = None,
    policy_url: str = "",
    policy_token: str | None = None,
) -> AsyncIterator[Teachers]:
    """`store`: file for their answers. Raises `RunError` if a teacher cannot score the policy's tokens."""
    stored = await asyncio.to_thread(ScoreStore, store)
    async with aiohttp.ClientSession(trust_env=True) as session:
        teachers = [
            Teacher(
                one,
                session,
                tokenizer,
                stored,
                url=f"{policy_url.rstrip('/')}/v1" if one.url is None else one.url,
                token=policy_token if one.policy else None,
            )
            for one in settings
        ]
        try:
            for teacher in teachers:
                await teacher.check_tokenizer()
            yield Teachers(teachers)
        finally:
            for teacher in teachers:
                await teacher.close()
            stored.close()


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
