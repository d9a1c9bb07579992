"""`act-alerting`: the receiver's command line, the one place that reads the environment.

Exit codes: 0 after a clean end; 1 when the port is in use, a test message was not taken, a file
would be overwritten, an alert reaches nobody, a hop of a drill is broken, a checkpoint is not whole
or the database cannot be read; 2 when a setting or a name is wrong. `supervise` has more:
docs/supervise.md. typer and the server are imported when used: without the extra `alerting` this
says how to get them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from alerting.exceptions import AlertingError, ConfigError, NotSentError
from alerting.logs import configure_logging
from alerting.phrases import LANGUAGES

if TYPE_CHECKING:
    import typer

    from alerting.mode import Mode
    from alerting.targets import Target


def main() -> None:
    """Entry point of `act-alerting`."""
    needed = ("typer", "fastapi", "uvicorn", "pydantic", "requests")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"not installed: {', '.join(missing)}. Run: pip install 'act-exporter[alerting]'", 1)
    _application()()


def _application() -> typer.Typer:
    import typer

    from alerting import checkpoint_commands
    from alerting import help as texts
    from alerting.supervise import command as supervise

    # Plain tracebacks: typer's show the values of locals, and one of those is the token.
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        add_completion=False,
        help="From Alertmanager's notifications to requests that a trainer's guard acts on.",
    )

    given_config = typer.Option(
        None, envvar="ACT_RECEIVER_CONFIG", help="YAML file with the receiver's settings."
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"act-alerting {importlib.metadata.version('act-exporter')}")
            raise typer.Exit

    @app.callback()
    def common(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", callback=print_version, is_eager=True
        ),
    ) -> None:
        pass

    @app.command(help=texts.SERVE_HELP)
    def serve(
        config: Path | None = given_config,
        listen: str | None = typer.Option(None, help="HOST:PORT; port 0 takes a free one."),
        runs: Path | None = typer.Option(None, help="Folder that holds the run folders."),
        database: Path | None = typer.Option(None, help="SQLite file; made if it is not there."),
        token_file: Path | None = typer.Option(None, help="File with the bearer token, mode 600."),
    ) -> None:
        from alerting.serve import serve as receive
        from alerting.settings import load_settings

        with _exit_codes():
            configure_logging()
            options = {
                "listen": listen,
                "runs": runs,
                "database": database,
                "token_file": token_file,
            }
            receive(load_settings(config, options))

    @app.command(help=texts.INIT_HELP)
    def init(
        folder: Path = typer.Argument(Path(), help="Where to write; created where missing."),
        bot: list[str] = typer.Option(
            [], help="feishu (Lark too), dingtalk or wecom; may be given several times."
        ),
        language: str = typer.Option("en", help="Of the bots' messages: en or zh."),
    ) -> None:
        from alerting.init import BOT_FILES, next_commands, write_folder

        for name in bot:
            if name not in BOT_FILES:
                _fail(f"--bot: must be one of {', '.join(BOT_FILES)}, not {name!r}.", 2)
        if language not in LANGUAGES:
            _fail(f"--language: must be one of {', '.join(LANGUAGES)}, not {language!r}.", 2)
        try:
            written = write_folder(folder, bot, language)
        except ConfigError as error:
            _fail(str(error), 1)
        for path in written:
            typer.echo(f"wrote {path}")
        typer.echo("\nNext:")
        for line in next_commands(folder, bot):
            typer.echo(f"  {line}")

    @app.command(help=texts.STATUS_HELP)
    def status(
        config: Path | None = given_config,
        runs: Path | None = typer.Option(None, help="Folder that holds the run folders."),
        database: Path | None = typer.Option(None, help="The receiver's SQLite file."),
    ) -> None:
        from alerting.settings import load_mode, load_places

        options = {"runs": runs, "database": database}
        with _exit_codes():
            _, configured = load_mode(config, options)
            _print_status(*load_places(config, options), configured)

    @app.command(help=texts.MODE_HELP)
    def mode(
        mode: str | None = typer.Argument(None, help="act or notify-only; without, it is printed."),
        config: Path | None = given_config,
        database: Path | None = typer.Option(None, help="The receiver's SQLite file."),
    ) -> None:
        from alerting.settings import load_mode

        with _exit_codes():
            typer.echo(_mode(mode, *load_mode(config, {"database": database})))

    @app.command(help=texts.CHECK_HELP)
    def check(
        alertmanager: Path = typer.Argument(..., help="The alertmanager.yml."),
        config: Path | None = given_config,
        amtool: Path | None = typer.Option(None, help="Alertmanager's tool; else from the PATH."),
    ) -> None:
        with _exit_codes():
            _check(alertmanager, config, amtool)

    @app.command(help=texts.DRILL_HELP)
    def drill(
        run: str = typer.Option(..., help="Name of a run that is training now."),
        config: Path | None = given_config,
        runs: Path | None = typer.Option(None, help="Folder that holds the run folders."),
        database: Path | None = typer.Option(None, help="The receiver's SQLite file."),
        listen: str | None = typer.Option(None, help="HOST:PORT of the receiver."),
        token_file: Path | None = typer.Option(None, help="File with the bearer token."),
        alertmanager: str = typer.Option("http://localhost:9093", help="Alertmanager's address."),
        people: bool = typer.Option(True, help="Send the drill's message to people."),
        label: list[str] = typer.Option(
            [],
            metavar="NAME=VALUE",
            help="A further label of the alert, which your routes ask for: namespace=training under"
            " prometheus-operator. May be given several times.",
        ),
        # People's messages leave after the 30 s of `group_wait`, a bot that was busy is asked again
        # 5 and 10 s later, and a guard answers between two steps, which may take a minute each.
        wait: float = typer.Option(120, min=1, help="Seconds to wait for all of it."),
    ) -> None:
        from alerting.drill import perform
        from alerting.settings import load_settings

        options = {
            "listen": listen,
            "runs": runs,
            "database": database,
            "token_file": token_file,
        }
        with _exit_codes():
            settings = load_settings(config, options)
            if not perform(
                settings,
                alertmanager,
                run,
                people=people,
                labels=label,
                wait_seconds=wait,
                out=sys.stdout,
            ):
                sys.exit(1)

    @app.command(help=texts.SEND_TEST_HELP)
    def send_test(
        config: Path = typer.Option(
            ..., envvar="ACT_RECEIVER_CONFIG", help="YAML file with the settings."
        ),
        only: str | None = typer.Option(None, help="Name of the one target to send to."),
    ) -> None:
        from alerting.settings import load_targets

        try:
            targets = load_targets(config)
        except ConfigError as error:
            _fail(str(error), 2)
        chosen = [target for target in targets if only in (None, target.name)]
        if not chosen:
            names = ", ".join(target.name for target in targets)
            _fail(f"--only: {config} has no target {only!r}; it has {names}.", 2)
        refused = [target for target in chosen if not _send_test(target)]
        if refused:
            sys.exit(1)

    supervise.register(app)
    app.add_typer(checkpoint_commands.application(), name="checkpoints")
    return app


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """Ends with 2 for a wrong setting and 1 for what else is wrong, each in a sentence."""
    try:
        yield
    except ConfigError as error:
        _fail(str(error), 2)
    except AlertingError as error:
        _fail(str(error), 1)


def _send_test(target: Target) -> bool:
    from alerting.message import of_test

    try:
        said = f"taken ({target.notifier.send(of_test(target.language))})"
        taken = True
    except NotSentError as error:
        said, taken = f"not taken: {error}", False
    sys.stdout.write(f"{target.name} ({target.kind}): {said}\n")
    return taken


def _check(alertmanager: Path, config: Path | None, amtool: Path | None) -> None:
    from alerting.check import check_alertmanager
    from alerting.settings import load_notify

    tool = shutil.which(amtool or "amtool")
    if tool is None:
        _fail(f"{amtool or 'amtool'} is not there; it comes with Alertmanager. See --amtool.", 2)
    targets = load_notify(config) if config is not None else ()
    lines, lost = check_alertmanager(alertmanager, Path(tool), targets)
    for line in lines:
        sys.stdout.write(f"{line}\n")
    listed = ", ".join(f"{target.name} ({target.kind}, {target.language})" for target in targets)
    if config is not None:
        sys.stdout.write(f"notify: in {config} lists {listed or 'nobody'}\n")
    if lost:
        _fail(f"{alertmanager}: reaches nobody: {', '.join(lost)}.", 1)


def _mode(wanted: str | None, database: Path, configured: Mode) -> str:
    """Switch the mode, where one is wanted; a line about the one in force."""
    from alerting.mode import MODES, switch, switched_to
    from alerting.store import open_reader

    chosen = next((mode for mode in MODES if mode == wanted), None)
    if wanted is not None and chosen is None:
        _fail(f"The mode must be one of {', '.join(MODES)}, not {wanted!r}.", 2)
    with contextlib.closing(open_reader(database)) as reader:
        if chosen is not None:
            switch(database, chosen, time.time())
        now = switched_to(reader.read)
    return f"{now} (switched to)" if now is not None else f"{configured} (of the config)"


def _print_status(runs: Path, database: Path, configured: Mode) -> None:
    from alerting.mode import switched_to
    from alerting.overview import all_runs, count_messages
    from alerting.store import open_reader
    from alerting.table import print_runs

    now = time.time()
    with contextlib.closing(open_reader(database)) as reader:
        print_runs(all_runs(runs, reader.read, now), now, sys.stdout)
        waiting, failed = count_messages(reader.read, now).get("", (0, 0))
        if waiting or failed:
            sys.stdout.write(f"messages of no run: {waiting} waiting, {failed} failed\n")
        if (switched_to(reader.read) or configured) == "notify-only":
            sys.stdout.write("mode notify-only: no trainer is asked for anything\n")


def _fail(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"act-alerting: {sentence}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
