"""`act-exporter doctor`; registered by `act_exporter.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from act_exporter.exceptions import ActExporterError
from act_exporter.progress import progress

if TYPE_CHECKING:
    from act_exporter.doctor.report import Report

HELP = """Say why a model is unstable, or would be, and what to change.

A checklist is walked on your model and a batch, in seconds to a minute; both
are left as they were. MODULE:FUNCTION is a function of yours that returns
them, in a module that can be imported from here. A batch is a dict (the
model's keyword arguments), a tuple or list (its arguments) or its one
argument. Gradients are examined where the model returns its loss, or an
output with one as "loss". In sick.py:

\b
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

\b
    def build():
        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4))
        model.transformer.h[2].mlp.c_fc.weight.data *= 100
        tokens = torch.randint(0, 50257, (2, 64))
        return model, {"input_ids": tokens, "labels": tokens}

Example: act-exporter doctor sick:build --picture sick.png

More is examined where a dict is returned, with any of model, batch,
optimizer, scheduler, scaler, batches (some more of the data) and train_step
(a function that takes one whole step of a batch).

After an alert, with what a TrainingGuard has saved (its save_batch_bytes):

\b
    act-exporter doctor train:build \\
        --checkpoint runs/gpt/checkpoints/step-00000400-g0 \\
        --batch runs/gpt/batches/step-00000440-rank-00000.pt

The file's batch takes the place of the function's. A function with a
parameter `batch` is called with it instead, and returns what the model takes
of it. Only open checkpoints of people whom you trust: torch's index is a
pickle.

The exit code is 0 where nothing critical was found, 1 with a critical
finding, and 2 where an argument is wrong or the model cannot run the batch.
"""

_MISSING = "--picture needs its packages: pip install 'act-exporter[report]'"


def doctor(
    target: str = typer.Argument(..., metavar="MODULE:FUNCTION"),
    checkpoint: Path | None = typer.Option(
        None, help="A guard's checkpoint, a folder: the model gets its weights."
    ),
    batch: Path | None = typer.Option(
        None, help="A batch that a guard saved: examined in place of the function's."
    ),
    json: Path | None = typer.Option(
        None, "--json", help="Write the report as JSON; - is the standard output, without the text."
    ),
    picture: Path | None = typer.Option(
        None, help="Write a picture, PNG: activations by depth, linear and logarithmic."
    ),
    reproduction: Path | None = typer.Option(
        None,
        help="Write a script with 2 to 4 layers of the same configuration, of a transformers"
        " model.",
    ),
    quiet: bool = typer.Option(
        False, "--quiet", "-q", help="Print nothing; the exit code says it."
    ),
) -> None:
    if picture is not None:
        try:
            from act_exporter.doctor.picture import write_picture
        except ImportError:
            _fail(_MISSING)
    from act_exporter.doctor.given import given

    try:
        arguments = given(target, checkpoint=checkpoint, batch=batch)
        if reproduction is not None:  # refused before the time is spent on an examination
            from act_exporter.doctor.reproduction import reproduce

            script = reproduce(arguments["model"], arguments["batch"])
            reproduction.write_text(script, encoding="utf-8")
        report = _examined(arguments)
        name = type(arguments["model"]).__name__
        if picture is not None and report.profile:
            write_picture(picture, report, f"{name}, from {target}")
        elif picture is not None and not quiet:
            typer.echo(f"act-exporter: {picture} not written: no forward to draw", err=True)
        if json is not None and str(json) != "-":
            json.write_text(report.to_json(), encoding="utf-8")
    except (ActExporterError, OSError) as error:
        _fail(str(error))
    if str(json) == "-":
        typer.echo(report.to_json(), nl=False)
    elif not quiet:
        _print(report)
    raise typer.Exit(report.exit_code)


def _examined(arguments: dict[str, object]) -> Report:
    from act_exporter.doctor.checks import CHECKS
    from act_exporter.doctor.examination import examine

    with progress("checks", len(CHECKS)) as advance:
        return examine(**arguments, on_check=lambda _: advance())  # type: ignore[arg-type]


def _print(report: Report) -> None:
    from rich.console import Console

    from act_exporter.doctor.table import rendered

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(rendered(report))
    else:
        typer.echo(str(report))


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"act-exporter: {sentence}", err=True)
    raise typer.Exit(2)
