"""The machinery of `tests.benchmarks.first_layer`, on runs of a few steps; figures are its own."""

from __future__ import annotations

import pytest

from tests.benchmarks import first_layer, recordings
from tests.benchmarks.faults import FAULTS, Fault, garbage, nan_weight, weights
from tests.benchmarks.first_layer import ASKED, Told, behind, broken, has_layer, judged, play

NAN = Fault("one NaN weight", nan_weight, "blocks.2.mlp.down", float("nan"), steps=6)
QKV = Fault("one NaN weight", nan_weight, "blocks.1.attn.qkv", float("nan"), steps=6)
SMALL = Fault("weights times 1.01", weights, "blocks.1.mlp.up", 1.01, steps=6)
GARBAGE = Fault("garbage batch", garbage, "one byte", 1, steps=6)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    folder = tmp_path_factory.mktemp("first_layer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recordings.PREFIXES, "plain", (recordings.PREFIXES["plain"][0], 8))
        found = play("plain", [NAN, QKV, SMALL, GARBAGE], folder)
    return {one.fault.name: one for one in found}


def test_the_right_one_is_the_first_watched_tensor_at_or_behind_the_broken_module(told) -> None:
    assert told[NAN.name].right == {("blocks.2.mlp.down", "output")}
    # The projection of query, key and value is not watched; what attention makes of it is.
    assert told[QKV.name].right == {("blocks.1.attn.proj", "input")}
    assert told[SMALL.name].right == {("blocks.1.mlp.down", "input")}
    assert told[GARBAGE.name].right == set()


def test_of_several_broken_modules_the_first_tensor_behind_each_is_right() -> None:
    model = recordings.PREFIXES["plain"][0]()
    everywhere = Fault("weights times 10", weights, "all projections", 10)
    found = behind(model, broken(everywhere, model))
    assert {name for name in found if name[0].startswith("blocks.0.")} == {
        ("blocks.0.attn.proj", "input"),
        ("blocks.0.attn.proj", "output"),
        ("blocks.0.mlp.down", "input"),
        ("blocks.0.mlp.down", "output"),
    }
    assert broken(NAN, model) == []


def test_page_report_and_watch_name_it(told) -> None:
    for fault in (NAN, QKV):
        assert told[fault.name].bad
        assert told[fault.name].named == dict.fromkeys(ASKED, *told[fault.name].right)
    assert not told[SMALL.name].bad
    assert told[SMALL.name].named == dict.fromkeys(ASKED)


def test_what_is_counted(told) -> None:
    right = ("blocks.2.mlp.down", "output")
    other = {**dict.fromkeys(ASKED, right), "watch": None}
    misled = Told(NAN, frozenset({right}), "activation", True, other)
    spared = Told(QKV, frozenset({right}), "parameters", True, other)
    result = judged([told[NAN.name], misled, spared, told[SMALL.name], told[GARBAGE.name]])
    kind = result["kinds"]["one NaN weight"]
    assert (kind["faults"], kind["went_bad"]) == (3, 3)
    assert kind["page"] == kind["report"] == {"right": 2, "wrong": 0}
    assert kind["watch"] == {"right": 1, "wrong": 1}
    (wrong,) = result["wrong"]
    assert (wrong["right"], wrong["watch"]) == (["blocks.2.mlp.down output"], None)
    assert [one["fault"] for one in result["no_culprit"]] == [QKV.name]
    assert result["nowhere"] == [SMALL.name]
    assert [one["fault"] for one in result["no_layer"]] == [GARBAGE.name]


def test_each_fault_of_the_table_has_a_layer_or_a_reason() -> None:
    without = {fault.kind for fault in FAULTS if not has_layer(fault)}
    assert without == {
        *first_layer.NO_LAYER,
        "optimizer state",
        "before the baseline",
        "exp from the start",
    }
