"""A reward over a group: the shortest of n replies wins. As in "The Env" of verifiers' docs, where `finalize` compares traces."""

import asyncio

import verifiers.v1 as vf


class WordTask(vf.Task[vf.TaskData]):
    pass


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> list[WordTask]:
        return [WordTask(vf.TaskData(prompt=f"A word of the language {i}?"), self.config.task) for i in range(4)]


class ShortestConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    n: int = 4


class ShortestEnv(vf.Env[ShortestConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.critic.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.config.n):
                group.create_task(agents.player.run(task))
            group.create_task(agents.critic.run(task.with_data(prompt="Say something about words.")))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        replies = [trace for trace in episode.traces if trace.agent.name == "player"]
        ranked = sorted(len(trace.last_reply) for trace in replies)
        for trace in replies:
            trace.record_reward("shortest", float(len(trace.last_reply) == ranked[0]))


__all__ = ["ShortestEnv", "WordTaskset"]
