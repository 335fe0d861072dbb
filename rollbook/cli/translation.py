"""Makes commands of typer from functions that describe their arguments with `rollbook.commands.arguments`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from rollbook.commands.arguments import Argument, Option
from rollbook.contracts.plugin import load_on_demand

Command = Callable[..., int | None]
"""A function of `rollbook/commands`. It returns the exit code; None is 0."""


def typer_app(text: str | None = None, *, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """The help is plain text: importing rich would take longer than the rest of `--help`."""
    return typer.Typer(
        help=text,
        cls=cls,
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
    )


def typer_command(name: str, command: Command | Mapping[str, Command], *, summary: str | None) -> Any:
    """A command of typer; from several functions by name, a group of commands with this summary."""
    if isinstance(command, Mapping):
        app = typer_app(summary)
        for inner, function in command.items():
            app.command(inner, cls=_command_class(function))(_translated(function))
        return typer.main.get_group(app)
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(name, cls=_command_class(command))(_translated(command))
    return typer.main.get_command(single)


class CommandWithSettings(TyperCommand):
    """A command with `--set`: an unknown option such as `--max-steps` is answered with the setting of that name."""

    overrides: Option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            # click's error of an unknown option. typer has its own click, or another one, by its version.
            if hasattr(error, "possibilities") and (advice := self._advice(str(error.option_name), given)):  # type: ignore[attr-defined]
                ctx.fail(f"No such option: {error.option_name}. {advice}")  # type: ignore[attr-defined]
            raise
        return rest

    def _advice(self, option: str, given: Sequence[str]) -> str:
        section = (self.overrides.metavar or "").partition(".")[0]
        value = next((text.partition("=")[2] for text in given if text.startswith(f"{option}=")), "")
        if not value and option in given[:-1]:
            value = given[given.index(option) + 1]
        advice: str = load_on_demand("rollbook.run.config.suggestions:option_advice")(
            option,
            load_on_demand(str(self.overrides.settings)),
            flag=self.overrides.flag,
            # A metavar in capitals stands for every section.
            section="" if section.isupper() else f"{section}.",
            value=value,
        )
        return advice


def _command_class(command: Command) -> type[TyperCommand]:
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    described = [one for parameter in parameters for one in get_args(parameter.annotation)]
    option = next((one for one in described if isinstance(one, Option) and one.settings is not None), None)
    return TyperCommand if option is None else type("_Command", (CommandWithSettings,), {"overrides": option})


def _translated(command: Command) -> Callable[..., None]:
    @functools.wraps(command)
    def call(**arguments: Any) -> None:
        if code := command(**arguments):
            raise typer.Exit(code)

    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(annotation=_annotation(parameter.annotation)) for parameter in signature.parameters.values()
    ]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return call


def _annotation(annotation: Any) -> Any:
    """The annotation of a parameter, with the description that typer reads."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *described = get_args(annotation)
    return Annotated[kind, *(_described(one) for one in described)]


def _described(one: Any) -> Any:
    match one:
        case Argument():
            return typer.Argument(help=one.help, metavar=one.metavar)
        case Option():
            flags = (one.flag,) if one.short is None else (one.flag, one.short)
            return typer.Option(
                *flags,
                help=one.help,
                metavar=one.metavar,
                min=one.min,
                max=one.max,
                envvar=one.variable,
                hidden=one.is_hidden,
            )
        case _:
            return one
