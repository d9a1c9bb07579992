"""The command `act-exporter`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from act_exporter.collector import LayerPage
from act_exporter.exceptions import ActExporterError, SettingError
from act_exporter.layers import Tap, find_taps

if TYPE_CHECKING:
    from rich.table import Table


def main() -> None:
    """Entry point; says what to install where the command line's packages are missing."""
    try:
        import typer
    except ImportError:
        sys.exit(
            "act-exporter needs its command-line packages: pip install 'act-exporter[alerting]'"
        )

    from act_exporter import __version__
    from act_exporter.assets import write_assets

    app = typer.Typer(
        no_args_is_help=True,
        help="Activation statistics of a model in training, for Prometheus.",
    )

    @app.callback()
    def root() -> None:
        """Activation statistics of a model in training, for Prometheus."""

    @app.command()
    def assets(
        folder: Path = typer.Argument(..., help="Where to write them; created where missing."),
    ) -> None:
        """Write out the alert rules, server configurations and deployment files.

        Example: act-exporter assets monitoring
        """
        try:
            for path in write_assets(folder):
                typer.echo(path)
        except (ActExporterError, OSError) as error:
            typer.echo(f"act-exporter: {error}", err=True)
            raise typer.Exit(1) from None

    @app.command()
    def layers(
        target: str = typer.Argument(
            ...,
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns the model, in a module that can be"
            " imported from here.",
        ),
        watch: list[str] = typer.Option(
            ["sublayers"],
            help="As start_exporter's: sublayers, blocks, all, or a glob over module names, which"
            " may be given several times.",
        ),
    ) -> None:
        """List the tensors of a model that would be watched, and how many series they make.

        Nothing is trained and nothing is served; the function is called once.

        Example, with a function build_model in train.py:

        act-exporter layers train:build_model --watch "*.attn" --watch "*.mlp"
        """
        from rich.console import Console

        try:
            taps = find_taps(_build(target), _watch(watch))
        except ActExporterError as error:
            typer.echo(f"act-exporter: {error}", err=True)
            raise typer.Exit(2) from None
        table = _table(taps)
        console = Console()
        if not console.is_terminal:
            # In a pipe each line is one tensor, for grep.
            widest = console.options.update(width=10_000)
            console.width = max(console.width, console.measure(table, options=widest).maximum)
        console.print(table)
        series = LayerPage(taps, {}).series
        tensors = "1 tensor" if len(taps) == 1 else f"{len(taps)} tensors"
        typer.echo(f"{tensors}, {series} series at most")

    @app.command()
    def version() -> None:
        """Print the version."""
        typer.echo(__version__)

    app()


def _build(target: str) -> nn.Module:
    """The model that the user's `module:function` returns."""
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise SettingError(
            f"{target!r} is not of the form module:function, such as train:build_model"
        )
    # A console script finds its own folder there, not the user's.
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The user's module may be there and miss another.
        missing = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        raise SettingError(
            f"no module {error.name!r} can be imported from {Path.cwd()}"
            if missing
            else f"importing {module_name!r} failed: {_said(error)}"
        ) from error
    except Exception as error:
        raise SettingError(f"importing {module_name!r} failed: {_said(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SettingError(f"module {module_name!r} has no function {function_name!r}")
    try:
        model = function()
    except Exception as error:
        raise SettingError(f"{target} failed: {_said(error)}") from error
    if not isinstance(model, nn.Module):
        raise SettingError(f"{target} returned {type(model).__name__}, which is no torch.nn.Module")
    return model


def _said(error: Exception) -> str:
    """An error in one line, as it is part of a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _watch(watch: list[str]) -> str | list[str]:
    levels = sorted({"sublayers", "blocks", "all"} & set(watch))
    if levels and len(watch) > 1:
        raise SettingError(f"--watch {levels[0]} is a level and cannot be joined with others")
    return watch[0] if len(watch) == 1 else watch


def _table(taps: list[Tap]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("layer", "tensor", "kind"):
        table.add_column(column, overflow="fold")
    for tap in taps:
        # Text, since a name with brackets would be taken for markup.
        table.add_row(Text(tap.layer), Text(tap.tensor), Text(tap.kind))
    return table


if __name__ == "__main__":
    main()
