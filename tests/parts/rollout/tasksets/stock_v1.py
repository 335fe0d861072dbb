"""Several turns with a tool of the task: the policy looks up two prices. As in "Adding tools" of verifiers' docs."""

import verifiers.v1 as vf

PRICES = {"apples": 3, "pears": 4}


class StockToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "stock"

    @vf.tool
    async def price(self, item: str) -> str:
        """The price of an item."""
        return f"{item} cost {PRICES[item]}"


class StockData(vf.TaskData):
    answer: str


class StockTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class StockTask(vf.Task[StockData, vf.State, StockTaskConfig]):
    @classmethod
    def toolsets(cls, config: StockTaskConfig) -> list[vf.Toolset]:
        return [StockToolset(config.tools)]

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class StockConfig(vf.TasksetConfig):
    task: StockTaskConfig = StockTaskConfig()


class StockTaskset(vf.Taskset[StockTask, StockConfig]):
    def load(self) -> list[StockTask]:
        return [StockTask(StockData(prompt="apples and pears?", answer="7"), self.config.task)]


__all__ = ["StockTaskset"]

if __name__ == "__main__":
    StockToolset.run()
