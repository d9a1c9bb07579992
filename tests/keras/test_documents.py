"""The examples for Keras and other trainers in README and docs/keras.md, as they stand there."""

import re
import urllib.request
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
PAGE = (REPOSITORY / "docs" / "keras.md").read_text()


def example(document: str, of: str) -> str:
    """The first block of Python that has those words; on any free port."""
    blocks = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    return next(block for block in blocks if of in block).replace("port=9460", "port=0")


def ran(code: str, **given: object) -> str:
    """What the exporter's page says after the example was run."""
    names = dict(given)
    exec(compile(code, "example", "exec"), names)
    exporter = names["exporter"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
            return answer.read().decode()
    finally:
        exporter.close()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_readmes_keras_model_is_watched_and_guarded(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(96, 16)).astype("float32")
    page = ran(example(README, "KerasGuard"), keras=keras, x=x, y=x[:, :1])
    assert re.search(r"^act_step\{.*\} 6\.0$", page, re.MULTILINE)
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step-00000006-g0").is_dir()


def test_the_readmes_arrays_are_on_the_page() -> None:
    def train_step(batch: int) -> tuple[float, dict[str, np.ndarray]]:
        return 2.5, {layer: np.full(3, batch) for layer in ("embed", "blocks.0", "head")}

    page = ran(example(README, "integrations.arrays"), batches=[1.0, 2.0], train_step=train_step)
    assert re.search(r'^act_layer_absmax\{.*layer="blocks.0".*\} 2(\.0)?$', page, re.MULTILINE)
    assert re.search(r"^act_loss\{.*\} 2\.5$", page, re.MULTILINE)


def test_the_pages_transformer_is_watched_and_guarded(tmp_path: Path) -> None:
    page = ran(example(PAGE, "MultiHeadAttention"))
    assert re.search(r"^act_step\{.*\} 32\.0$", page, re.MULTILINE)
    assert 'layer="multi_head_attention' in page
    assert (tmp_path / "runs" / "gpt" / "checkpoints" / "step-00000032-g0").is_dir()


def test_the_pages_own_loop_is_watched() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="first")])
    page = ran(
        example(PAGE, "def train(x, y)"),
        model=model,
        optimizer=keras.optimizers.SGD(0.1),
        loss_fn=keras.losses.MeanSquaredError(),
        dataset=tf.data.Dataset.from_tensor_slices((np.ones((8, 4)), np.ones((8, 3)))).batch(2),
        **_imports(PAGE),
    )
    assert re.search(r"^act_step\{.*\} 4\.0$", page, re.MULTILINE)
    assert re.search(r'^act_layer_calls_total\{.*layer="first".*\} 4(\.0)?$', page, re.MULTILINE)


def _imports(document: str) -> dict[str, object]:
    """What the page's first example imports; the later ones go on from it."""
    names: dict[str, object] = {}
    block = example(document, "import keras")
    exec("\n".join(re.findall(r"^(?:import|from) .*$", block, re.MULTILINE)), names)
    names.pop("__builtins__")
    return names
