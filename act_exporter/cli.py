"""The command `act-exporter`."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from act_exporter.collector import LayerPage
from act_exporter.exceptions import ActExporterError, SettingError
from act_exporter.levels import BASELINE_STEPS
from act_exporter.loading import call, find_function
from act_exporter.progress import progress
from act_exporter.taps import Tap

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn


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
    from act_exporter.capacity.command import capacity
    from act_exporter.doctor.command import HELP as DOCTOR_HELP
    from act_exporter.doctor.command import doctor
    from act_exporter.report.command import HELP as REPORT_HELP
    from act_exporter.report.command import report
    from act_exporter.rules import DEFAULTS, RuleThresholds, write_rules
    from act_exporter.watch.command import watch

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

    app.command()(watch)
    app.command()(capacity)

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

        from act_exporter.layers import find_taps

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
    def backfill(
        folder: Path = typer.Argument(..., help="A run's journal folder."),
        output: Path | None = typer.Option(
            None, "--output", "-o", help="Where to write; the standard output by default."
        ),
    ) -> None:
        """Turn journals into OpenMetrics, for the steps that no scrape saw.

        Prometheus takes them into its own folder, --storage.tsdb.path, and loads them at its next
        compaction or start:

        act-exporter backfill runs/gpt/journal -o gpt.om

        promtool tsdb create-blocks-from openmetrics gpt.om /var/lib/prometheus

        The series have the names and labels of the live page, their generation, and
        job="act-journal". Older samples than --storage.tsdb.retention.time are deleted again;
        samples of the last 15 minutes are left out, since the live rules would judge them anew.
        Sorting takes about as much space in $TMPDIR as the journals have uncompressed.
        """
        from act_exporter.backfill import YOUNGEST_SECONDS, parts
        from act_exporter.backfill import backfill as write_openmetrics
        from act_exporter.records import Reader

        try:
            reader = Reader(folder)
            with progress("backfill", parts(reader)) as advance:
                written = write_openmetrics(
                    reader,
                    lambda: _opened(output),
                    now=time.time(),
                    progress=advance,
                )
        except (ActExporterError, OSError, sqlite3.Error) as error:
            typer.echo(f"act-exporter: {error}", err=True)
            raise typer.Exit(1) from None
        if reader.skipped:
            typer.echo(f"{reader.skipped} lines skipped: torn by a crash, or no record", err=True)
        if written.same:
            typer.echo(
                f"{written.same} records left out: a later one has the same millisecond", err=True
            )
        if written.young:
            typer.echo(
                f"{written.young} records left out: younger than {YOUNGEST_SECONDS // 60} minutes,"
                " or of the future; the live rules would judge them anew",
                err=True,
            )
        if not written.records:
            typer.echo("act-exporter: no records are left, nothing was written", err=True)
            raise typer.Exit(1)
        typer.echo(f"{written.samples} samples of {written.records} records", err=True)

    @app.command()
    def baseline(
        folder: Path = typer.Argument(..., help="The journal folder of a small, healthy run."),
        output: Path = typer.Option(..., "--output", "-o", help="Where to write."),
        steps: int = typer.Option(
            BASELINE_STEPS, min=1, help="Sampled steps that are taken, the last ones of the run."
        ),
    ) -> None:
        """Learn baselines from a small run, for a large one of the same layer names.

        They are the median absmax of each tensor over the run's last 100 sampled steps. A run with
        an anomaly in those, or with fewer, is refused.

        Example: act-exporter baseline runs/small/journal -o baseline.json
        """
        from act_exporter.levels import learn_levels, write_levels
        from act_exporter.records import Reader

        try:
            levels = learn_levels(Reader(folder), steps)
            write_levels(output, levels)
        except (ActExporterError, OSError) as error:
            typer.echo(f"act-exporter: {error}", err=True)
            raise typer.Exit(1) from None
        for layer, tensor in levels.left_out:
            typer.echo(f"left out: {layer} ({tensor}) ran too seldom or was 0", err=True)
        typer.echo(
            f"{len(levels.absmax)} baselines from steps {levels.steps[0]} to {levels.steps[-1]} of"
            f" run {levels.run}"
        )

    app.command(help=DOCTOR_HELP)(doctor)
    app.command(help=REPORT_HELP)(report)

    @app.command()
    def rules(
        folder: Path = typer.Option(
            ..., "-o", "--output", help="Where to write the rule files; created where missing."
        ),
        hard: float = typer.Option(
            DEFAULTS.hard, help="Times the baseline that a layer may reach."
        ),
        sigma: float = typer.Option(
            DEFAULTS.sigma, help="Standard deviations above the window's mean."
        ),
        window: int = typer.Option(DEFAULTS.window, help="Sampled steps in the window."),
        consecutive: int = typer.Option(
            DEFAULTS.consecutive, help="Bad sampled steps in a row that ask for a rollback."
        ),
        vmalert: bool = typer.Option(False, "--vmalert", help="For VictoriaMetrics' vmalert."),
    ) -> None:
        """Render the alert rules for other thresholds than the shipped ones.

        The trainer must judge by the same: give them to start_exporter too. Files that were
        rendered before are replaced.

        Example: act-exporter rules --hard 50 -o monitoring/prometheus/rules
        """
        try:
            thresholds = RuleThresholds(
                hard=hard, sigma=sigma, window=window, consecutive=consecutive
            )
            for path in write_rules(folder, thresholds, vmalert=vmalert):
                typer.echo(path)
        except (ActExporterError, OSError) as error:
            typer.echo(f"act-exporter: {error}", err=True)
            raise typer.Exit(1) from None

    @app.command()
    def version() -> None:
        """Print the version."""
        typer.echo(__version__)

    try:
        app()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.exit("act-exporter: this command needs torch: pip install 'act-exporter[torch]'")


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    """The file, or the standard output, which stays open."""
    if output is None:
        yield sys.stdout
    else:
        with output.open("w", encoding="utf-8") as stream:
            yield stream


def _build(target: str) -> nn.Module:
    """The model that the user's `module:function` returns."""
    from torch import nn

    model = call(target, find_function(target))
    if not isinstance(model, nn.Module):
        raise SettingError(f"{target} returned {type(model).__name__}, which is no torch.nn.Module")
    return model


def _watch(watch: list[str]) -> str | list[str]:
    levels = sorted({"sublayers", "blocks", "all"} & set(watch))
    if levels and len(watch) > 1:
        raise SettingError(f"--watch {levels[0]} is a level and cannot be joined with others")
    return watch[0] if len(watch) == 1 else watch


def _table(taps: Sequence[Tap]) -> Table:
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
