"""An evaluation with real worker processes."""

from rollbook.contracts.task import Task, TaskId
from rollbook.rollout.evaluation import ALL, open_evaluator, summarise
from rollbook.telemetry.events import EventLog
from tests.parts.rollout.dispatching import config_of, spec_of


async def test_every_episode_without_a_score_is_counted_also_if_it_left_no_sample() -> None:
    tasks = [
        Task(id=TaskId("solved"), row={"secret": 1}),
        Task(id=TaskId("failed"), row={"secret": 1, "action": "raise"}),
    ]
    spec = spec_of(config_of(completions_per_prompt=3, min_samples=1), publication=1)
    async with open_evaluator(spec, concurrency=2, label_field="tier", log=EventLog("test")) as evaluator:
        played = await evaluator.measure(tasks)
    assert [task.unscorable for task in played] == [0, 3]
    overall = summarise(ALL, played)
    assert (overall.episodes, overall.unscorable) == (3, 3)
