"""`rollbook push`: uploads the model of a run to the Hugging Face Hub, with a model card."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rollbook import __version__
from rollbook.commands.arguments import Argument, AsJson, Option
from rollbook.commands.output import result_json, say
from rollbook.commands.record.evaluate import checkpoint_model
from rollbook.contracts.errors import UsageError
from rollbook.contracts.plugin import load_on_demand
from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.telemetry.metrics import read_metrics

PREFIX = "hf:"
CARD = "README.md"
SHOWN_METRICS = ("rollout/raw_reward", "rollout/raw_accuracy", "eval/solved", "eval/reward", "train/loss", "train/kl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    repository: str
    url: str
    step: int
    files: tuple[str, ...]


def push(
    run: Path,
    to: str,
    *,
    step: int | None = None,
    is_private: bool = False,
    revision: str | None = None,
    endpoint: str | None = None,
) -> Pushed:
    """`to` is `hf:ORG/NAME`. Raises `UsageError` or `RunError`; then the repository has its previous content."""
    repository = to.removeprefix(PREFIX)
    if not to.startswith(PREFIX) or not repository:
        raise UsageError(f"--to {to!r}: write the repository as hf:ORG/NAME")
    directory = RunDirectory(run.resolve())
    config = load_resolved_config(directory).config
    model_dir, found = checkpoint_model(directory, step)
    metrics = {
        name: row[name]
        for row in read_metrics(directory.metrics_file)
        if row.get("step", 0) <= found
        for name in SHOWN_METRICS
        if row.get(name) is not None
    }
    files: dict[str, Path | bytes] = {
        str(path.relative_to(model_dir)): path
        for path in sorted(model_dir.rglob("*"))
        if path.is_file() and path.name != CARD
    }
    files[CARD] = model_card(config, repository, step=found, metrics=metrics).encode()
    upload = load_on_demand("rollbook.commands.record.hub:upload")
    url: str = upload(
        repository,
        files,
        message=f"Step {found} of run {config.run.name}",
        is_private=is_private,
        revision=revision,
        endpoint=endpoint,
    )
    return Pushed(repository=repository, url=url, step=found, files=tuple(files))


def model_card(config: RunConfig, repository: str, *, step: int, metrics: Mapping[str, Any]) -> str:
    """What the model is and how it was trained. Contains no paths and no settings of user code."""
    trainer = config.trainer
    base = config.model.path or ""
    is_public = base.count("/") == 1 and not base.startswith((".", "/", "~")) and not Path(base).exists()
    rows = {
        "run": config.run.name,
        "step": step,
        "loss": trainer.loss,
        "advantage": trainer.recipe.advantage,
        "learning rate": trainer.lr or "from the width of the model",
        "groups per step": config.gate.groups_per_step,
        "completions per prompt": config.rollout.completions_per_prompt,
        "staleness bound": config.gate.max_head_offpolicy_versions,
        "temperature": config.rollout.sampling.temperature,
        **{name: f"{value:.4g}" for name, value in metrics.items()},
    }
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    head += [f"base_model: {base}"] if is_public else []
    head += ["tags:", "- rollbook", "- reinforcement-learning", "---", ""]
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(
        [
            *head,
            f"# {repository.rpartition('/')[2]}",
            "",
            f"Trained with reinforcement learning by Rollbook {__version__}.",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{repository}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repository}")',
            "```",
            "",
        ]
    )


def push_command(
    run: Annotated[Path, Argument(help="The run directory.")],
    *,
    to: Annotated[str, Option("--to", metavar="hf:ORG/NAME", help="A repository on the Hugging Face Hub.")],
    step: Annotated[
        int | None, Option("--step", min=0, help="A checkpoint; default: the newest. 0 is the initial model.")
    ] = None,
    private: Annotated[bool, Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, Option("--revision", help="The branch to commit to; default: main.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload the model, its tokenizer and a model card as one commit. HF_TOKEN and HF_ENDPOINT are honoured."""
    done = push(run, to, step=step, is_private=private, revision=revision)
    if as_json:
        result_json({"repository": done.repository, "url": done.url, "step": done.step, "files": list(done.files)})
    else:
        say(f"step {done.step} is at {done.url} ({len(done.files)} files)")
