"""Which layers of a Keras model are watched, and under which names."""

import keras
import pytest
from keras import layers

from act_exporter import NothingToWatchError, SettingError
from act_exporter.integrations.keras.layers import find_taps
from tests.keras.models import Decoder, decoder, functional, written_out


def named(model, watch="sublayers"):
    return [(tap.layer, tap.tensor) for tap in find_taps(model, watch)]


IN_A_BLOCK = [
    ("attention", "input"),
    ("attention.query", "output"),
    ("attention.key", "output"),
    ("attention.value", "output"),
    ("attention.attention_output", "input"),
    ("attention.attention_output", "output"),
    ("feed_forward.dense_1", "input"),
    ("feed_forward.dense_1", "output"),
]


class TestSublayers:
    def test_a_subclassed_model_is_named_by_its_attributes(self):
        taps = named(decoder())
        assert taps[0] == ("embedding", "output")
        assert taps[1:10] == [
            *((f"blocks.0.{part}", side) for part, side in IN_A_BLOCK),
            ("blocks.0", "output"),
        ]
        assert taps[-2:] == [("norm", "output"), ("head", "output")]

    def test_a_functional_model_is_named_by_its_layers(self):
        taps = named(functional())
        assert taps[0] == ("embedding", "output")
        assert ("block_1.attention.key", "output") in taps
        assert ("block_1", "output") in taps
        assert taps[-2:] == [("layer_normalization", "output"), ("dense", "output")]

    def test_an_rnn_is_one_layer_since_kernels_for_gpus_never_call_its_cell(self):
        model = keras.Sequential(
            [
                keras.Input((6, 4)),
                layers.LSTM(4, return_sequences=True),
                layers.LSTM(4, return_sequences=True),
                layers.Bidirectional(layers.GRU(4)),
                layers.Dense(1),
            ]
        )
        assert named(model) == [
            ("lstm", "output"),
            ("lstm_1", "output"),
            ("bidirectional.forward_layer", "output"),
            ("bidirectional.backward_layer", "output"),
            ("dense", "output"),
        ]
        assert "lstm.cell" not in {layer for layer, _ in named(model, "all")}

    def test_names_do_not_hang_on_what_was_made_before(self):
        assert named(functional()) == named(functional())
        assert named(decoder()) == named(decoder())
        assert named(written_out()) == named(written_out())

    def test_names_that_the_user_gave_stay(self):
        given = keras.Input((4,))
        x = given
        for number in (0, 1, 7):
            x = layers.Dense(4, name=f"dense_{number}")(x)
        assert named(keras.Model(given, layers.Dense(1, name="out")(x))) == [
            ("dense_0", "output"),
            ("dense_1", "output"),
            ("dense_7", "output"),
            ("out", "output"),
        ]

    @pytest.mark.parametrize("make", [decoder, functional, written_out])
    def test_a_layer_has_its_like_in_each_block(self, make):
        taps = find_taps(make(3))
        kinds = [tap.kind for tap in taps]
        inside = {kind for kind in kinds if kinds.count(kind) > 1}
        assert all(kinds.count(kind) == 3 for kind in inside)
        assert len(inside) >= 8

    def test_logits_have_a_limit_and_nothing_else_has(self):
        for model in (decoder(), functional(), written_out()):
            limits = [tap.limit for tap in find_taps(model)]
            assert limits[-1] == 16_000_000
            assert set(limits[:-1]) == {None}

    def test_queries_and_keys_know_their_heads(self):
        heads = {tap.layer: tap.heads for tap in find_taps(decoder()) if tap.heads}
        assert set(heads) == {
            f"blocks.{block}.attention.{part}" for block in (0, 1) for part in ("query", "key")
        }
        query = heads["blocks.1.attention.query"]
        assert (query.attention, query.dim) == ("blocks.1.attention", 8)
        assert query.scale == pytest.approx(8**-0.5)

    def test_of_two_towers_the_blocks_are_watched(self):
        class Tower(layers.Layer):
            def __init__(self):
                super().__init__()
                self.blocks = decoder(2).blocks

            def call(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        given = keras.Input((6, 16))
        taps = named(keras.Model(given, Tower()(Tower()(given))), "blocks")
        assert [layer for layer, _ in taps] == [
            "tower.blocks.0",
            "tower.blocks.1",
            "tower_1.blocks.0",
            "tower_1.blocks.1",
        ]

    def test_a_plain_network_is_watched_where_it_multiplies(self):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(2, 3),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        assert named(model) == [("conv2d", "output"), ("dense", "output")]


class TestOtherChoices:
    def test_globs_and_a_function(self):
        model = decoder()
        assert named(model, "*.attention_output") == [
            ("blocks.0.attention.attention_output", "output"),
            ("blocks.1.attention.attention_output", "output"),
        ]
        norms = named(model, lambda _, layer: isinstance(layer, layers.LayerNormalization))
        assert len(norms) == 5

    def test_all_layers_have_names_of_their_own(self):
        for model in (decoder(), functional(), written_out()):
            names = [layer for layer, _ in named(model, "all")]
            assert len(set(names)) == len(names) >= 20

    def test_a_shared_layer_has_one_name(self):
        shared = layers.Dense(4)
        given = keras.Input((4,))
        inner = keras.Model(given, shared(given), name="inner")
        outer = keras.Input((4,))
        model = keras.Model(outer, shared(inner(shared(outer))))
        assert [name for name, _ in named(model, "all")].count("dense") == 1
        assert sum("dense" in name for name, _ in named(model, "all")) == 1


class TestRefusals:
    def test_a_model_that_is_not_built(self):
        with pytest.raises(SettingError, match="is not built"):
            find_taps(Decoder())

    def test_nothing_to_watch(self):
        with pytest.raises(NothingToWatchError, match="its layers are: embedding,"):
            find_taps(decoder(), "no.such.*")

    def test_no_such_choice(self):
        with pytest.raises(SettingError, match="expected 'sublayers'"):
            find_taps(decoder(), [])

    def test_a_model_that_only_calls_itself_built(self):
        model = Decoder()
        with pytest.warns(UserWarning, match="actually built"):
            model.build((None, 6))
        with pytest.raises(SettingError, match="is not built"):
            find_taps(model)
