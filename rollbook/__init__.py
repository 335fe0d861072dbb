"""Rollbook: asynchronous reinforcement learning for LLM agents, in which no rollout is lost, trained twice, or left unexplained.

Everything that users import is here. Other module paths may move. A name is imported when it is first used, so `import rollbook`
loads nothing else. docs/python-api.md describes every name.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "TO_BE_SCORED",
    "AsyncRolloutWorker",
    "Completion",
    "ConfigError",
    "Curriculum",
    "CursorDataLoader",
    "EndReason",
    "EnvConfig",
    "EnvSession",
    "Environment",
    "EnvironmentSource",
    "EpisodeError",
    "EvaluationReport",
    "FinishReason",
    "FreshnessRule",
    "FunctionService",
    "GroupAssembler",
    "GrpoPool",
    "LedgerClient",
    "LossInputs",
    "LossSettings",
    "LossTerms",
    "MessageTrajectoryAssembler",
    "MiniStackPool",
    "ModelTokenizer",
    "MultiTurnEnvPool",
    "Observation",
    "ParsedText",
    "PromptGroup",
    "RewardCase",
    "RollbookError",
    "Rollout",
    "RolloutFn",
    "RolloutRequest",
    "RolloutSample",
    "RolloutService",
    "RolloutSetup",
    "RowRequest",
    "RowResolution",
    "RunConfig",
    "RunFailedError",
    "RunSettings",
    "SamplingParams",
    "Sandbox",
    "SandboxImage",
    "SandboxLimits",
    "Sink",
    "StalenessController",
    "SyncLedgerClient",
    "SyncWeightTransferClient",
    "Task",
    "TokenRow",
    "ToolCall",
    "TrainReport",
    "TrajectoryAssembler",
    "WeightTransferClient",
    "__version__",
    "audit",
    "create_app",
    "encode_group",
    "evaluate",
    "open_host",
    "open_ledger_client",
    "open_sandbox",
    "open_sync_ledger_client",
    "parse_tool_calls",
    "pass_at",
    "replay",
    "rollout_to_prompt_group",
    "run_async_rl_loop",
    "run_code",
    "serve_environments",
    "serve_rollouts",
    "train",
]

if TYPE_CHECKING:
    from rollbook.commands.record.evaluate import EvaluationReport, evaluate
    from rollbook.commands.record.replay import replay
    from rollbook.commands.training.train import RunFailedError, train
    from rollbook.commands.training.train_summary import TrainReport
    from rollbook.contracts.admission import RunSettings
    from rollbook.contracts.errors import EpisodeError, RollbookError
    from rollbook.contracts.freshness import FreshnessRule
    from rollbook.contracts.group import PromptGroup
    from rollbook.contracts.group_codec import encode_group
    from rollbook.contracts.output_formats import ToolCall, parse_tool_calls
    from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
    from rollbook.contracts.ports import Environment
    from rollbook.contracts.task import Observation, Task
    from rollbook.contracts.trajectory import EndReason, RolloutSample, TokenRow
    from rollbook.envs.builtin.awscli.cloud.ministack_pool import MiniStackPool
    from rollbook.envs.catalog import EnvironmentSource
    from rollbook.envs.client.group import GrpoPool, MultiTurnEnvPool
    from rollbook.envs.client.session import EnvSession
    from rollbook.envs.config import EnvConfig
    from rollbook.envs.server.run import create_app, serve_environments
    from rollbook.inference.weights.client import WeightTransferClient
    from rollbook.integrations.async_recipe import RowRequest, run_async_rl_loop
    from rollbook.integrations.recipe_groups import GroupAssembler, Rollout, RowResolution, rollout_to_prompt_group
    from rollbook.integrations.trl_run import AsyncRolloutWorker, open_host
    from rollbook.integrations.weight_sync import SyncWeightTransferClient
    from rollbook.ledger.client.blocking import SyncLedgerClient, open_sync_ledger_client
    from rollbook.ledger.client.client import LedgerClient, open_ledger_client
    from rollbook.rollout.agents.tool_calls import ParsedText
    from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
    from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
    from rollbook.rollout.chat.tokenizer import ModelTokenizer
    from rollbook.rollout.contract import RolloutFn, RolloutSetup
    from rollbook.rollout.dispatch.slots import StalenessController
    from rollbook.rollout.remote.protocol import RolloutRequest, RolloutService
    from rollbook.rollout.remote.server import FunctionService, serve_rollouts
    from rollbook.rollout.rewards.group_functions import pass_at
    from rollbook.rollout.rewards.messages import RewardCase
    from rollbook.rollout.settings import TO_BE_SCORED
    from rollbook.run.config.run import ConfigError, RunConfig
    from rollbook.run.reader import audit
    from rollbook.sandbox.bubblewrap import open_sandbox
    from rollbook.sandbox.code import run_code
    from rollbook.sandbox.sandbox import Sandbox, SandboxImage, SandboxLimits
    from rollbook.tasks.curriculum import Curriculum
    from rollbook.tasks.cursor import CursorDataLoader
    from rollbook.telemetry.sinks.sink import Sink
    from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms

# The same imports as above, for `__getattr__`.
_MODULES = {
    "AsyncRolloutWorker": "rollbook.integrations.trl_run",
    "Completion": "rollbook.contracts.policy",
    "ConfigError": "rollbook.run.config.run",
    "Curriculum": "rollbook.tasks.curriculum",
    "CursorDataLoader": "rollbook.tasks.cursor",
    "EndReason": "rollbook.contracts.trajectory",
    "EnvConfig": "rollbook.envs.config",
    "EnvSession": "rollbook.envs.client.session",
    "Environment": "rollbook.contracts.ports",
    "EnvironmentSource": "rollbook.envs.catalog",
    "EpisodeError": "rollbook.contracts.errors",
    "EvaluationReport": "rollbook.commands.record.evaluate",
    "FinishReason": "rollbook.contracts.policy",
    "FreshnessRule": "rollbook.contracts.freshness",
    "FunctionService": "rollbook.rollout.remote.server",
    "GroupAssembler": "rollbook.integrations.recipe_groups",
    "GrpoPool": "rollbook.envs.client.group",
    "LedgerClient": "rollbook.ledger.client.client",
    "LossInputs": "rollbook.trainer.losses.inputs",
    "LossSettings": "rollbook.trainer.losses.inputs",
    "LossTerms": "rollbook.trainer.losses.inputs",
    "MessageTrajectoryAssembler": "rollbook.rollout.assemblers.chat",
    "MiniStackPool": "rollbook.envs.builtin.awscli.cloud.ministack_pool",
    "ModelTokenizer": "rollbook.rollout.chat.tokenizer",
    "MultiTurnEnvPool": "rollbook.envs.client.group",
    "Observation": "rollbook.contracts.task",
    "ParsedText": "rollbook.rollout.agents.tool_calls",
    "PromptGroup": "rollbook.contracts.group",
    "RewardCase": "rollbook.rollout.rewards.messages",
    "RollbookError": "rollbook.contracts.errors",
    "Rollout": "rollbook.integrations.recipe_groups",
    "RolloutFn": "rollbook.rollout.contract",
    "RolloutRequest": "rollbook.rollout.remote.protocol",
    "RolloutSample": "rollbook.contracts.trajectory",
    "RolloutService": "rollbook.rollout.remote.protocol",
    "RolloutSetup": "rollbook.rollout.contract",
    "RowRequest": "rollbook.integrations.async_recipe",
    "RowResolution": "rollbook.integrations.recipe_groups",
    "RunConfig": "rollbook.run.config.run",
    "RunFailedError": "rollbook.commands.training.train",
    "RunSettings": "rollbook.contracts.admission",
    "SamplingParams": "rollbook.contracts.policy",
    "Sandbox": "rollbook.sandbox.sandbox",
    "SandboxImage": "rollbook.sandbox.sandbox",
    "SandboxLimits": "rollbook.sandbox.sandbox",
    "Sink": "rollbook.telemetry.sinks.sink",
    "StalenessController": "rollbook.rollout.dispatch.slots",
    "SyncLedgerClient": "rollbook.ledger.client.blocking",
    "SyncWeightTransferClient": "rollbook.integrations.weight_sync",
    "TO_BE_SCORED": "rollbook.rollout.settings",
    "Task": "rollbook.contracts.task",
    "TokenRow": "rollbook.contracts.trajectory",
    "ToolCall": "rollbook.contracts.output_formats",
    "TrainReport": "rollbook.commands.training.train_summary",
    "TrajectoryAssembler": "rollbook.rollout.assemblers.tokens",
    "WeightTransferClient": "rollbook.inference.weights.client",
    "audit": "rollbook.run.reader",
    "create_app": "rollbook.envs.server.run",
    "encode_group": "rollbook.contracts.group_codec",
    "evaluate": "rollbook.commands.record.evaluate",
    "open_host": "rollbook.integrations.trl_run",
    "open_ledger_client": "rollbook.ledger.client.client",
    "open_sandbox": "rollbook.sandbox.bubblewrap",
    "open_sync_ledger_client": "rollbook.ledger.client.blocking",
    "parse_tool_calls": "rollbook.contracts.output_formats",
    "pass_at": "rollbook.rollout.rewards.group_functions",
    "replay": "rollbook.commands.record.replay",
    "rollout_to_prompt_group": "rollbook.integrations.recipe_groups",
    "run_async_rl_loop": "rollbook.integrations.async_recipe",
    "run_code": "rollbook.sandbox.code",
    "serve_environments": "rollbook.envs.server.run",
    "serve_rollouts": "rollbook.rollout.remote.server",
    "train": "rollbook.commands.training.train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rollbook' has no attribute {name!r}; it has {', '.join(sorted(_MODULES))}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
