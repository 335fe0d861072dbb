"""Loading the user's rollout function, and the worker spec: faults are reported before a worker plays."""

import asyncio

import pytest

from rollbook.contracts.errors import RunError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import build_rollout, load_rollout
from rollbook.rollout.workers.spec import WorkerSpec
from tests.parts.rollout.guessing import setup_of

HERE = "tests.parts.rollout.functions"


def test_make_rollout_is_loaded_from_a_module_or_an_attribute() -> None:
    setup, _ = setup_of()
    for path in (HERE, f"{HERE}:make_rollout", "chat"):
        assert asyncio.iscoroutinefunction(build_rollout(load_rollout(path), setup, path=path))


@pytest.mark.parametrize("name", ["plays_a_row", "plays_a_row_with_its_setup", "PLAYS"])
async def test_an_async_rollout_function_needs_no_factory(name: str) -> None:
    setup, _ = setup_of()
    rollout = build_rollout(load_rollout(f"{HERE}:{name}"), setup, path=name)
    played = await rollout({"secret": 3})
    assert played is not None
    assert played.facts == {"row": {"secret": 3}, "max_tokens": setup.sampling.max_tokens if "setup" in name else None}


DOTTED = {
    "agent": "rollbook.rollout.agents.rollout",
    "chat": "rollbook.rollout.episodes.chat",
    "remote": "rollbook.rollout.remote.client",
}


@pytest.mark.parametrize("name", DOTTED)
def test_a_built_in_rollout_function_has_a_short_name_and_keeps_its_dotted_name(name: str) -> None:
    found = load_rollout(name)
    assert load_rollout(DOTTED[name]) is found
    assert load_rollout(f"{DOTTED[name]}:make_rollout") is found
    assert RolloutConfig(function=DOTTED[name]).function == RolloutConfig(function=name).function == name


def test_an_unknown_short_name_lists_the_known_ones_and_suggests_the_nearest() -> None:
    with pytest.raises(
        RunError, match=r"'agnet'.*\(built in: agent, chat, remote, tools, verifiers\); did you mean 'agent'\?"
    ):
        load_rollout("agnet")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("no_such_module_anywhere", "no module"),
        (f"{HERE}:make_async", "make_rollout is async"),
        (f"{HERE}:plays_three", r"an async rollout function takes \(row\) or \(row, setup\)"),
    ],
)
def test_a_rollout_function_that_cannot_be_used_is_rejected(path: str, fault: str) -> None:
    with pytest.raises(RunError, match=f"^rollout.function = '{path}': {fault}"):
        load_rollout(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("make_not_async", "must return an async function"), ("make_raising", "raised OSError: no such dataset")],
)
def test_the_return_value_of_make_rollout_is_checked(name: str, message: str) -> None:
    setup, _ = setup_of()
    with pytest.raises(RunError, match=message):
        build_rollout(load_rollout(f"{HERE}:{name}"), setup, path=name)


def test_a_spec_that_cannot_be_pickled_names_the_field() -> None:
    spec = WorkerSpec(builder="a:b", config=RolloutConfig(), settings={"fine": 1, "lock": lambda: 0})
    with pytest.raises(RunError, match=r"settings\['lock'\] \(a function\) cannot be pickled"):
        spec.pickled()


def test_the_innermost_value_that_cannot_be_pickled_is_named() -> None:
    grader = {"grader": {"clients": [1, lambda: 0]}}
    spec = WorkerSpec(builder="a:b", config=RolloutConfig(), settings=grader)
    with pytest.raises(RunError, match=r"settings\['grader'\]\['clients'\]\[1\] \(a function\) cannot be pickled"):
        spec.pickled()
