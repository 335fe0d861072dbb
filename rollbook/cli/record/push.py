"""`rollbook push`: uploads the model of a run."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import AsJson
from rollbook.cli.output import result_json, stderr_console
from rollbook.commands.record.push import push as upload


def push(
    run: Annotated[Path, typer.Argument(help="The run directory.")],
    *,
    to: Annotated[str, typer.Option("--to", metavar="hf:ORG/NAME", help="A repository on the Hugging Face Hub.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="A checkpoint; default: the newest. 0 is the initial model.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="The branch to commit to; default: main.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload the model, its tokenizer and a model card as one commit. HF_TOKEN and HF_ENDPOINT are honoured."""
    done = upload(run, to, step=step, is_private=private, revision=revision)
    if as_json:
        result_json({"repository": done.repository, "url": done.url, "step": done.step, "files": list(done.files)})
    else:
        stderr_console().print(f"step {done.step} is at {done.url} ({len(done.files)} files)", markup=False)
