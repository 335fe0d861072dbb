"""Coding agents by name: which program to run, with which files in its home, and how it finds the episode's address.

Nothing of these programs is bundled. `find_program` names the command that installs one. What is written here is the whole
configuration that a program gets: its home is private to the episode.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.rollout.contract import ChatSession

MODEL, SMALL_MODEL = "policy", "policy-small"
TASK_FIELDS = ("instruction", "question", "prompt", "task")
"""Fields of a row that may have the task, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a program runs and what it is asked. Paths are those that the program sees."""

    home: str
    work: str
    base_url: str
    key: str
    task: str
    context_tokens: int
    """Limit of one sequence, so that the program compacts its history in time."""
    reply_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingOptions:
    """Settings of the run for a coding agent."""

    environment: Mapping[str, str]
    arguments: Sequence[str]
    """More arguments of the program."""
    context_tokens: int
    reply_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    command: Sequence[str]
    """The first entry is the name of the program."""
    env: Mapping[str, str]
    stdin: str = ""
    """The task, except for programs that do not read it: an argument that starts with a dash would be an option."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents by path below the home."""

    def arguments(self, options: CodingOptions) -> list[str]:
        """Those of the settings come after the first: Codex reads the task where "-" is, the last argument."""
        return [self.command[1], *options.arguments, *self.command[2:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    program: str
    install: str
    launch: Callable[[Place], Launch]


def _codex(place: Place) -> Launch:
    config: dict[str, str | int | bool] = {
        "model": MODEL,
        "model_provider": "rollbook",
        "model_context_window": place.context_tokens,
        "check_for_update_on_startup": False,
    }
    provider: dict[str, str | int | bool] = {
        "name": "rollbook",
        "base_url": place.base_url,
        "wire_api": "responses",
        "env_key": "OPENAI_API_KEY",
        # A retry would sample another turn. The policy client retries itself.
        "request_max_retries": 0,
        "stream_max_retries": 0,
    }
    return Launch(
        # The program's own sandbox needs rights that it lacks in a sandbox of the run, and it cannot ask a person.
        command=[
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "--color=never",
            f"--cd={place.work}",
            "-",
        ],
        stdin=place.task,
        env={"CODEX_HOME": f"{place.home}/.codex", "OPENAI_API_KEY": place.key},
        files={
            ".codex/config.toml": f"{_toml(config)}\n[model_providers.rollbook]\n{_toml(provider)}"
            "\n[analytics]\nenabled = false\n"
        },
    )


def _claude_code(place: Place) -> Launch:
    quiet = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_AUTOUPDATER",
        "DISABLE_ERROR_REPORTING",
        "DISABLE_TELEMETRY",
        # Without it the program refuses to run commands without questions as root.
        "IS_SANDBOX",
    )
    return Launch(
        command=["claude", "--print", "--dangerously-skip-permissions", f"--model={MODEL}"],
        stdin=place.task,
        env={
            **dict.fromkeys(quiet, "1"),
            "ANTHROPIC_BASE_URL": place.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": place.key,
            # Requests without tools under another name are side requests: titles, summaries of pages.
            **dict.fromkeys(("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), SMALL_MODEL),
            # A line with a changing number in the system prompt: every turn would be a new sequence.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CONFIG_DIR": f"{place.home}/.claude",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(place.reply_tokens),
            # The second alone is never below 100,000, and the first alone is not read.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(place.context_tokens),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(place.context_tokens),
        },
    )


def launch_pi(place: Place, api: str = "openai-completions") -> Launch:
    base_url = place.base_url.removesuffix("/v1") if api == "anthropic-messages" else place.base_url
    model = {
        "id": MODEL,
        "contextWindow": place.context_tokens,
        "maxTokens": place.reply_tokens,
        "input": ["text"],
        "reasoning": False,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    providers = {"rollbook": {"baseUrl": base_url, "api": api, "apiKey": place.key, "models": [model]}}
    return Launch(
        command=["pi", "--print", "--offline", "--no-session", "--provider", "rollbook", "--model", MODEL],
        stdin=place.task,
        env={"PI_CODING_AGENT_DIR": f"{place.home}/.pi/agent", "PI_OFFLINE": "1"},
        files={".pi/agent/models.json": json.dumps({"providers": providers}, indent=1)},
    )


def _mini_swe_agent(place: Place) -> Launch:
    return Launch(
        command=[
            "mini",
            "--yolo",
            "--exit-immediately",
            "--cost-limit=0",
            f"--model=openai/{MODEL}",
            f"--output={place.home}/trajectory.json",
            f"--task={place.task}",
        ],
        env={
            "OPENAI_BASE_URL": place.base_url,
            "OPENAI_API_KEY": place.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{place.home}/.config/mini-swe-agent",
            # It would wait for minutes after the last turn of an episode. The policy client retries itself.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )


CODING_AGENTS: dict[str, CodingAgent] = {
    "codex": CodingAgent(program="codex", install="npm install -g @openai/codex", launch=_codex),
    "claude-code": CodingAgent(
        program="claude", install="npm install -g @anthropic-ai/claude-code", launch=_claude_code
    ),
    "pi": CodingAgent(program="pi", install="npm install -g @mariozechner/pi-coding-agent", launch=launch_pi),
    # Newer versions of litellm need a package that they do not install.
    "mini-swe-agent": CodingAgent(
        program="mini", install="pip install mini-swe-agent litellm==1.83.0", launch=_mini_swe_agent
    ),
}


def find_program(name: str, *, path: str | None = None) -> Path:
    """The program of a coding agent. `path`: search path; None: that of this process. Raises `RunError` if it is not installed."""
    agent = CODING_AGENTS[name]
    found = shutil.which(agent.program, path=path)
    if found is None:
        raise RunError(
            f"agent = {name!r}: the program {agent.program!r} is not installed; install it with: {agent.install}"
        )
    return Path(found)


def place_of(
    row: Mapping[str, Any], session: ChatSession, options: CodingOptions, *, home: str, work: str, base_url: str
) -> Place:
    task = next((row[name] for name in TASK_FIELDS if isinstance(row.get(name), str)), None)
    if task is None:
        raise RunError(f"a task for a coding agent needs one of {', '.join(TASK_FIELDS)}; this one has {sorted(row)}")
    return Place(
        home=home,
        work=work,
        base_url=base_url,
        key=session.id,
        task=task,
        context_tokens=options.context_tokens,
        reply_tokens=options.reply_tokens,
    )


def _toml(table: Mapping[str, str | int | bool]) -> str:
    """Strings, numbers and booleans in TOML are those of JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())
