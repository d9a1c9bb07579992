"""What a person and a program see of an examination."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from act_exporter.doctor import Finding, Report, Severity, examine
from act_exporter.doctor.picture import write_picture
from act_exporter.doctor.table import rendered


def finding(severity: Severity = "critical", **fields: Any) -> Finding:
    evidence: Mapping[str, float | int | str] = {"largest": math.inf, "growth": 8_123.4, "keys": 96}
    return Finding(
        **{
            "fault": "unbounded-feature-map",
            "severity": severity,
            "layer": "blocks.1.attn",
            "what": "Its context grows 8,123 times where its input grows twofold.",
            "change": "Use a bounded feature map.",
            "why": "A bounded map keeps the context within the values.",
            "evidence": evidence,
            **fields,
        }
    )


def report(*findings: Finding, **fields: Any) -> Report:
    given = {"findings": findings, "not_run": {}, "checks": ("attention",), "profile": ()}
    return Report(**{**given, **fields})


class TestExitCode:
    @pytest.mark.parametrize(
        ("severities", "error", "code"),
        [
            ([], None, 0),
            (["warning", "info"], None, 0),
            (["info", "critical"], None, 1),
            (["warning"], "IndexError: no such token", 2),
            (["critical"], "IndexError: no such token", 1),
        ],
    )
    def test_says_what_is_to_be_done(
        self, severities: list[Severity], error: str | None, code: int
    ) -> None:
        assert report(*map(finding, severities), error=error).exit_code == code


class TestJson:
    def test_has_all_of_it_in_strict_json(self) -> None:
        text = report(finding(), not_run={"clipping": "needs a train_step"}).to_json()
        assert text.endswith("}\n")
        said = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert said["not_run"] == {"clipping": "needs a train_step"}
        (first,) = said["findings"]
        assert first["fault"] == "unbounded-feature-map"
        assert first["evidence"] == {"largest": "Infinity", "growth": 8_123.4, "keys": 96}

    def test_the_profile_is_the_forward_in_order(self) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        said = examine(model, torch.ones(2, 4)).to_dict()["profile"]
        assert [(seen["layer"], seen["side"]) for seen in said] == [
            ("0", "input"),
            ("0", "output"),
            ("1", "input"),
            ("1", "output"),
        ]
        assert (said[0]["shape"], said[0]["dtype"], said[0]["absmax"]) == ([2, 4], "float32", 1.0)
        assert said[0]["nonfinite"] == 0


class TestText:
    def test_says_what_where_and_what_to_change_in_lines_that_fit(self) -> None:
        what = "Its context grows beyond what anybody has ever seen in a model. " * 5
        text = str(report(finding(what=what), finding("info", fault="norm-order", layer=None)))
        assert text.startswith("1 critical, 1 info; 1 of 1 checks ran\n\ncritical  unbounded-")
        assert "    Change: Use a bounded feature map.\n" in text
        assert "    Evidence: largest inf, growth 8,123, keys 96" in text
        assert "\ninfo  norm-order\n" in text
        assert max(map(len, text.splitlines())) <= 100

    def test_what_did_not_run_says_what_it_needs(self) -> None:
        text = str(report(not_run={"clipping": "needs a train_step"}))
        assert text.startswith("nothing found; 0 of 1 checks ran\n")
        assert text.endswith("Not run:\n    clipping: needs a train_step")

    def test_a_forward_that_fails_is_no_healthy_model(self) -> None:
        text = str(examine(nn.Linear(4, 3), torch.ones(2, 5)))
        assert "The forward failed: RuntimeError: mat1 and mat2 shapes cannot be" in text


class TestTable:
    def test_has_names_with_brackets_and_fits_the_terminal(self) -> None:
        console = Console(width=72, highlight=False)
        with console.capture() as shown:
            console.print(
                rendered(report(finding(layer="blocks[red].0"), error="ValueError: [/x]"))
            )
        text = shown.get()
        assert "The forward failed: ValueError: [/x]\n" in text
        assert "blocks[red].0" in text
        assert "Change: Use a bounded feature map." in text
        assert max(map(len, text.splitlines())) <= 72


class TestPicture:
    def test_shows_the_profile_with_what_is_not_finite(self, tmp_path: Path) -> None:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        with torch.no_grad():
            model[1].weight[0, 0] = math.inf
        examined = examine(model, torch.ones(2, 8))
        sick = report(finding(layer="1"), finding(layer="1"), profile=examined.profile)
        file = tmp_path / "sick.png"
        write_picture(file, sick, "four layers with $dollars_")
        assert file.read_bytes().startswith(b"\x89PNG")

    def test_a_forward_without_a_tensor_has_one_too(self, tmp_path: Path) -> None:
        file = tmp_path / "empty.png"
        write_picture(file, report(finding()), "nothing")
        assert file.stat().st_size > 1_000


def test_a_report_does_not_keep_the_model_alive() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    weight = weakref.ref(model[0].weight)
    examined = examine(model, torch.ones(2, 4))
    del model
    gc.collect()
    assert weight() is None
    assert examined.to_dict()["profile"][0]["layer"] == "0"
