"""Judges: models behind an OpenAI- or Anthropic-compatible URL that score an episode, or compare those of a group, by a rubric.

A judge is asked for each content until there is a score (`judgements.py`), at most so many times at once and per minute. An answer
that is an error, late, or no score is asked for again; after the last attempt the sample is unscorable, never 0. Judges run in the
worker's event loop: they wait for a server and compute nothing.
"""

import asyncio
import hashlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from string import Template
from typing import Any

import aiohttp

from rollbook.concurrency.retry import backoff
from rollbook.contracts.decoding import load_json, valid_text
from rollbook.contracts.errors import RunError
from rollbook.rollout.rewards.judge_prompts import (
    JudgeQuestion,
    is_cut,
    question_about,
    question_about_group,
    read_template,
    usage_of,
    verdict_of,
)
from rollbook.rollout.rewards.judgements import Judgement, Judgements
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.rollout.settings import JudgeNote, JudgeSettings, JudgeUsage, RewardFunction, Score

MAX_ANSWER_BYTES = 4 << 20
MAX_RETRY_AFTER_S = 60.0
KEPT_CHARS = 4000
"""Characters of a judge's text that are stored with a sample."""
REPEATED = frozenset({408, 409, 425, 429})
"""Statuses, besides 5xx, after which a request is sent again."""


class UnusableAnswerError(Exception):
    """The judge's answer is no score. `judgement` has its cost, if there was an answer."""

    def __init__(
        self, cause: str, *, judgement: Judgement | None = None, is_final: bool = False, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(cause)
        self.judgement = judgement
        self.is_final = is_final
        """Asking again does not help."""
        self.retry_after_s = retry_after_s


class Judge:
    """One model. Requests for the same content that are made at the same time share one answer."""

    def __init__(
        self,
        settings: JudgeSettings,
        session: aiohttp.ClientSession,
        stored: Judgements,
        *,
        function: str,
        template: Template,
        number: int = 0,
    ) -> None:
        """`number`: among the judges of the function with the same model. Each of them has a vote of its own."""
        self._settings = settings
        self._number = number
        self._session = session
        self._stored = stored
        self._function = function
        self._template = template
        self._slots = asyncio.Semaphore(settings.concurrent)
        self._next_at = 0.0
        self._asked: dict[str, asyncio.Task[Judgement]] = {}
        self._headers = {} if settings.api_key_env is None else _key_header(settings)

    @property
    def model(self) -> str:
        return self._settings.model

    async def score(self, case: RewardCase) -> tuple[Judgement | str, JudgeUsage]:
        """The answer, or why there is none; and what it cost."""
        return await self._answer(question_about(case, self._template, self._settings))

    async def score_group(self, cases: Sequence[RewardCase]) -> tuple[list[Judgement] | str, JudgeUsage]:
        """An answer for each case that has no score yet, in their order, or why there are none; and what they cost."""
        question = question_about_group(cases, self._template, self._settings)
        answer, usage = await self._answer(question)
        if isinstance(answer, str):
            return answer, usage
        verdicts = dict(zip(sorted(question.asked), answer.verdicts, strict=True))
        return [
            _changed(answer, score=score, text=text) for score, text in (verdicts[number] for number in question.asked)
        ], usage

    async def _answer(self, question: JudgeQuestion) -> tuple[Judgement | str, JudgeUsage]:
        usage = JudgeUsage()
        body = self._body(question)
        settings = self._settings
        # A prompt of the user's may lack the range of scores.
        content = [settings.api, settings.url, self._number, settings.low, settings.high, body]
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        if (found := self._stored.find(key)) is not None:
            return found, JudgeUsage(cached=1)
        if (asked := self._asked.get(key)) is None:
            asked = asyncio.create_task(self._ask(key, question, body, usage), name=f"judge.{self._function}")
            self._asked[key] = asked
            asked.add_done_callback(lambda _: self._asked.pop(key, None))
        else:
            usage = JudgeUsage(cached=1)
        try:
            # The answer is paid for and stored, even if the episode that asked for it is cancelled.
            return await asyncio.shield(asked), usage
        except UnusableAnswerError as error:
            return str(error), usage

    async def close(self) -> None:
        pending = list(self._asked.values())
        for asked in pending:
            asked.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _ask(self, key: str, question: JudgeQuestion, body: Mapping[str, Any], usage: JudgeUsage) -> Judgement:
        waits = backoff(first_s=self._settings.first_wait_s, max_s=30.0)
        for attempt in range(1, self._settings.attempts + 1):
            async with self._slots:
                await self._wait_for_turn()
                usage.requests += 1
                try:
                    judgement = await self._request(key, question, body)
                    usage.add(judgement)
                    return self._stored.add(judgement)
                except UnusableAnswerError as error:
                    usage.failed += 1
                    if error.judgement is not None:
                        usage.add(error.judgement)
                        self._stored.add(error.judgement)
                    failure = error
            if failure.is_final:
                break
            if attempt < self._settings.attempts:
                await asyncio.sleep(max(next(waits), min(failure.retry_after_s, MAX_RETRY_AFTER_S)))
        attempts = "" if failure.is_final else f" ({self._settings.attempts} attempts)"
        raise UnusableAnswerError(f"judge {self._settings.model} at {self._settings.url}: {failure}{attempts}")

    async def _wait_for_turn(self) -> None:
        """Keep to `requests_per_minute`."""
        if self._settings.requests_per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next_at)
        self._next_at = start + 60.0 / self._settings.requests_per_minute
        await asyncio.sleep(start - now)

    async def _request(self, key: str, question: JudgeQuestion, body: Mapping[str, Any]) -> Judgement:
        settings, began = self._settings, time.monotonic()
        path = "/chat/completions" if settings.api == "openai" else "/messages"
        try:
            async with self._session.post(
                settings.url.rstrip("/") + path,
                json=body,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
            ) as response:
                raw = await _limited(response)
                status, retry_after = response.status, response.headers.get("Retry-After", "")
        except TimeoutError:
            raise UnusableAnswerError(f"no answer within {settings.timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise UnusableAnswerError(f"nothing answers ({connect_failure(error)}); is its server running?") from None
        except aiohttp.ClientError as error:
            raise UnusableAnswerError(f"{type(error).__name__}: {error}") from None
        if status != 200:
            raise UnusableAnswerError(
                f"status {status}: {raw.decode(errors='replace')[:300]}",
                is_final=status < 500 and status not in REPEATED,
                retry_after_s=float(retry_after) if retry_after.isdecimal() else 0.0,
            )
        paid = Judgement(
            key=key,
            function=self._function,
            model=settings.model,
            seconds=round(time.monotonic() - began, 3),
            at=round(time.time(), 3),
        )
        try:
            answer = load_json(raw.decode())
            tokens_in, tokens_out = usage_of(answer)
            cost = (tokens_in * settings.price_in + tokens_out * settings.price_out) / 1e6
            paid = _changed(paid, tokens_in=tokens_in, tokens_out=tokens_out, cost=cost)
            verdict, is_incomplete = verdict_of(answer, api=settings.api), is_cut(answer, api=settings.api)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            text = raw.decode(errors="replace")[:KEPT_CHARS]
            cause = f"the response is no answer of a model ({type(error).__name__}: {error})"
            raise UnusableAnswerError(cause, judgement=_changed(paid, text=text, cause=cause)) from None
        try:
            found = question.read(verdict, low=settings.low, high=settings.high)
        except ValueError as error:
            text = verdict if isinstance(verdict, str) else json.dumps(verdict)
            cause = str(error)
            if is_incomplete:
                setting = f"rollout.rewards.functions.{self._function}.judge.max_tokens"
                cause = f"the answer was cut after {body['max_tokens']} tokens (raise {setting}): {cause}"
            failed = _changed(paid, text=valid_text(text)[:KEPT_CHARS], cause=cause)
            raise UnusableAnswerError(cause, judgement=failed) from None
        verdicts = tuple((score, valid_text(reason)[:KEPT_CHARS]) for score, reason in found)
        if question.asked:
            return _changed(paid, verdicts=verdicts)
        return _changed(paid, score=verdicts[0][0], text=verdicts[0][1])

    def _body(self, question: JudgeQuestion) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": settings.model,
            "max_tokens": question.most_tokens if settings.max_tokens is None else settings.max_tokens,
            "temperature": settings.temperature,
            "messages": [{"role": "user", "content": valid_text(question.prompt)}],
        }
        if settings.structured and settings.api == "openai":
            named = {"name": "verdict", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif settings.structured:
            body["tools"] = [{"name": "verdict", "description": "Your verdict.", "input_schema": question.schema}]
            body["tool_choice"] = {"type": "tool", "name": "verdict"}
        return body


class JudgePanel:
    """The judges of one reward function, whose scores are combined by a vote."""

    def __init__(self, function: RewardFunction, judges: Sequence[Judge]) -> None:
        self._function = function
        self._judges = judges

    async def score(self, case: RewardCase) -> Score:
        began = time.monotonic()
        answers = await asyncio.gather(*(judge.score(case) for judge in self._judges))
        usage = _total(spent for _, spent in answers)
        return self._voted([answer for answer, _ in answers], usage, seconds=time.monotonic() - began)

    async def score_group(self, cases: Sequence[RewardCase]) -> list[Score]:
        """A score for each case that has none yet. What they cost together counts for the first."""
        began = time.monotonic()
        answers = await asyncio.gather(*(judge.score_group(cases) for judge in self._judges))
        usage, seconds = _total(spent for _, spent in answers), time.monotonic() - began
        return [
            self._voted(
                [answer if isinstance(answer, str) else answer[i] for answer, _ in answers],
                usage if i == 0 else JudgeUsage(),
                seconds=seconds,
            )
            for i in range(sum(case.score is None for case in cases))
        ]

    def _voted(self, answers: Sequence[Judgement | str], usage: JudgeUsage, *, seconds: float) -> Score:
        notes = [
            JudgeNote(model=judge.model, score=None, text=answer)
            if isinstance(answer, str)
            else JudgeNote(model=answer.model, score=answer.score, text=answer.text)
            for judge, answer in zip(self._judges, answers, strict=True)
        ]
        causes = [note.text for note in notes if note.score is None]
        scores = [note.score for note in notes if note.score is not None]
        # Half of the judges could be the half that is wrong.
        is_enough = 2 * len(scores) > len(self._judges)
        return Score(
            value=vote(scores, kind=self._function.vote) if is_enough else None,
            cause=None if is_enough else "; ".join(causes),
            seconds=seconds,
            # The cause says it already, if there is one.
            notes=tuple(note for note in notes if is_enough or note.score is not None),
            usage=usage,
        )

    async def close(self) -> None:
        for judge in self._judges:
            await judge.close()


def vote(scores: Sequence[float], *, kind: str) -> float:
    """The mean, the median, or the most frequent score (the median of them, if several are)."""
    if kind == "mean":
        return statistics.fmean(scores)
    return statistics.median(scores if kind == "median" else statistics.multimode(scores))


@asynccontextmanager
async def open_judges(
    functions: Sequence[RewardFunction], *, search_path: Sequence[str], store: Path | None
) -> AsyncIterator[dict[str, JudgePanel]]:
    """The panels of the functions that have judges, by name. Raises `RunError` for a missing key or prompt file."""
    judged = [function for function in functions if function.judges]
    if not judged:
        yield {}
        return
    stored = await asyncio.to_thread(Judgements, store)
    async with aiohttp.ClientSession(trust_env=True) as session:
        panels = {
            function.name: JudgePanel(
                function,
                [
                    Judge(
                        settings,
                        session,
                        stored,
                        function=function.name,
                        template=read_template(
                            settings, search_path, function=function.name, is_group=function.is_of_group
                        ),
                        number=[(one.url, one.model) for one in function.judges[:at]].count(
                            (settings.url, settings.model)
                        ),
                    )
                    for at, settings in enumerate(function.judges)
                ],
            )
            for function in judged
        }
        try:
            yield panels
        finally:
            for panel in panels.values():
                await panel.close()
            stored.close()


def _key_header(settings: JudgeSettings) -> dict[str, str]:
    key = os.environ.get(settings.api_key_env or "")
    if not key:
        raise RunError(
            f"rollout.rewards.functions: the variable {settings.api_key_env} (api_key_env of a judge) is not set"
        )
    if settings.api == "openai":
        return {"Authorization": f"Bearer {key}"}
    return {"x-api-key": key, "anthropic-version": "2023-06-01"}


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > MAX_ANSWER_BYTES:
            raise UnusableAnswerError(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MB")
    return bytes(raw)


def _total(spent: Iterable[JudgeUsage]) -> JudgeUsage:
    total = JudgeUsage()
    for usage in spent:
        total.include(usage)
    return total


def _changed(judgement: Judgement, **changes: Any) -> Judgement:
    return Judgement(**{**{name: getattr(judgement, name) for name in judgement.__struct_fields__}, **changes})


def connect_failure(error: aiohttp.ClientConnectorError) -> str:
    """`Connection refused`, without the address, which the caller names."""
    code = error.os_error.errno
    return os.strerror(code) if code is not None and code > 0 else str(error.os_error)
