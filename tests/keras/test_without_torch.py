"""What a trainer without torch has, and what it is told where torch is needed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from act_exporter import Thresholds
from act_exporter.integrations.arrays import ArrayExporter, start_exporter
from act_exporter.records import Reader

QUICK = Thresholds(window=40, window_minimum=10, baseline_steps=10)
LAYERS = ["embed", "blocks.0", "blocks.1"]

TORCHS = {
    "act_exporter.capacity.*",  # a decoder of torch is what it counts on
    "act_exporter.doctor.*",  # examines models of torch
    *(
        f"act_exporter.{name}"
        for name in (
            *("changes", "fault_hook", "gradients", "graphs", "hooks", "kernels", "layers"),
            *("matrices", "memory", "norms", "probe", "ranks", "start", "statistics", "steps"),
            *("torch_exporter", "torch_instrumentation", "transfer", "updates"),
        )
    ),
    *(
        f"alerting.recovery.{name}"
        for name in (
            *("batches", "guard", "loader_position", "reentry", "rng", "staging"),
            *("torch_failures", "torch_ranks", "torch_steps", "training_state"),
        )
    ),
}
"""Modules that may need torch: what takes tensors of its models, examines or guards them."""

KERAS = {"act_exporter.integrations.keras", "act_exporter.integrations.keras.*"} | {
    "alerting.recovery.keras*"
}
"""Modules that may need Keras and TensorFlow."""

IMPORT_ALL = """
import importlib, json, pkgutil, sys
sys.modules["tensorflow"] = sys.modules["keras"] = sys.modules["torch"] = None
import act_exporter, alerting
missing = {}
for package in (act_exporter, alerting):
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", lambda name: None)
    for module in found:
        try:
            module.name.endswith("__main__") or importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing[module.name] = error.name.partition(".")[0]
print(json.dumps(missing))
"""


def run(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def act_exporter(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("from act_exporter.cli import main; main()", *arguments)


@pytest.fixture(scope="module")
def missing() -> dict[str, str]:
    """Module to the package for want of which it cannot be imported."""
    done = run(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


class TestModules:
    def test_this_is_an_environment_without_torch(self) -> None:
        assert importlib.util.find_spec("torch") is None

    def test_only_what_is_torchs_needs_it(self, missing: dict[str, str]) -> None:
        needing = {module for module, package in missing.items() if package == "torch"}
        assert _outside(needing, TORCHS) == set()
        # None stands there in vain.
        assert [own for own in TORCHS if not any(fnmatchcase(one, own) for one in needing)] == []

    def test_only_what_is_kerass_needs_tensorflow(self, missing: dict[str, str]) -> None:
        needing = {module for module, own in missing.items() if own in ("keras", "tensorflow")}
        assert needing
        assert _outside(needing, KERAS) == set()

    def test_a_step_of_arrays_imports_neither(self) -> None:
        done = run(
            "import numpy, sys\n"
            "from act_exporter.integrations.arrays import start_exporter\n"
            "with start_exporter(['a'], 0) as exporter:\n"
            "    exporter.observe('a', numpy.ones(3))\n"
            "    exporter.step()\n"
            "    exporter._render('')\n"
            "    exporter._show('')\n"
            "print({'torch', 'tensorflow', 'keras', 'jax'} & sys.modules.keys())\n"
        )
        assert done.stdout == "set()\n", done.stderr

    @pytest.mark.parametrize(
        ("line", "instead"),
        [
            ("from act_exporter import start_exporter", "act_exporter.integrations"),
            ("from alerting.recovery import TrainingGuard", "alerting.recovery.keras"),
        ],
    )
    def test_what_needs_torch_says_what_to_install(self, line: str, instead: str) -> None:
        with pytest.raises(ImportError) as caught:
            exec(line, {})
        assert "pip install 'act-exporter[torch]'" in str(caught.value)
        assert instead in str(caught.value)


def _outside(modules: set[str], patterns: set[str]) -> set[str]:
    return {own for own in modules if not any(fnmatchcase(own, one) for one in patterns)}


class TestArrays:
    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_headroom_is_that_of_their_own_format(self, dtype: Any) -> None:
        largest = float(ml_dtypes.finfo(dtype).max)
        with start_exporter(["a"], 0) as exporter:
            exporter.observe("a", np.array([1.0, -largest / 2], dtype=dtype))
            exporter.step()
            assert value(exporter, "act_layer_headroom_ratio") == pytest.approx(0.5)
            assert value(exporter, "act_layer_absmax") == largest / 2

    def test_what_is_not_finite_in_bfloat16_is_counted(self) -> None:
        with start_exporter(["a"], 0) as exporter:
            values = [1.0, np.nan, np.inf, np.inf, -np.inf]
            exporter.observe("a", np.array(values, dtype=ml_dtypes.bfloat16))
            exporter.step()
            for kind, count in (("nan", 1), ("posinf", 2), ("neginf", 1)):
                assert value(exporter, "act_layer_nonfinite_total", kind=kind) == count
            assert exporter.onset() == 1


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    journal = tmp_path_factory.mktemp("run") / "journal"
    with broken_run(journal):
        pass
    return journal


class TestCommands:
    """On a run whose second block goes bad at step 41."""

    def test_the_journal_holds_it(self, journal: Path) -> None:
        records = list(Reader(journal).records())
        assert {record.step for record in records} == set(range(1, 46))
        assert {record.layer for record in records} == set(LAYERS)

    def test_watch_names_the_layer(self, tmp_path: Path) -> None:
        with broken_run(tmp_path) as exporter:
            done = act_exporter("watch", "--once", f"127.0.0.1:{exporter.port}")
        assert "First was blocks.1 (output" in done.stdout
        assert done.returncode == 1

    def test_rules_are_those_that_are_shipped(self, tmp_path: Path) -> None:
        done = act_exporter("rules", "-o", tmp_path)
        assert done.returncode == 0, done.stderr
        shipped = Path(__file__).parents[2] / "prometheus" / "rules"
        written = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert written == {path.name: path.read_text() for path in shipped.glob("*.yml")}

    def test_a_report_needs_packages_of_its_own_and_no_torch(self, journal: Path) -> None:
        done = run(
            "import sys; sys.modules['orjson'] = None\nfrom act_exporter.cli import main; main()",
            *("report", journal, "-o", journal / "report.html"),
        )
        assert done.returncode != 0
        assert "pip install 'act-exporter[report]'" in done.stderr

    @pytest.mark.parametrize("command", ["layers", "doctor"])
    def test_what_takes_a_model_of_torch_says_so(self, command: str) -> None:
        done = act_exporter(command, "json:loads")
        assert done.returncode != 0
        assert "pip install 'act-exporter[torch]'" in done.stderr


def broken_run(journal: Path) -> ArrayExporter:
    """Its exporter, after 45 steps."""
    exporter = start_exporter(LAYERS, 0, run="jax", thresholds=QUICK, journal=journal)
    numbers = np.random.default_rng(3)
    for step in range(1, 46):
        for layer in LAYERS:
            factor = 1000 if step > 40 and layer == "blocks.1" else 1
            exporter.observe(layer, factor * numbers.normal(size=(4, 32)).astype(np.float32))
        exporter.record(loss=2.0)
        exporter.step()
    return exporter


def value(exporter: ArrayExporter, name: str, **labels: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
    (found,) = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found)
