"""The command `act-exporter`."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Entry point; says what to install where the command line's packages are missing."""
    try:
        import typer
    except ImportError:
        sys.exit(
            "act-exporter needs its command-line packages: pip install 'act-exporter[alerting]'"
        )

    from act_exporter import ActExporterError, __version__
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
    def version() -> None:
        """Print the version."""
        typer.echo(__version__)

    app()


if __name__ == "__main__":
    main()
