"""Ranks only divide what there is to learn: whatever their number, and however it changes when a run is resumed."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diglot.config import Recipe, load_recipe
from diglot.corpus import open_pairs
from diglot.index import Reading, index_corpus
from diglot.loader import UpdateReader, places
from diglot.parallel import World
from diglot.subwords import Subwords
from diglot.texts import Texts
from diglot.validation import ValidationText

Sample = tuple[int, tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def texts(phrases: list[tuple[str, str]], subwords: Subwords, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    directory = tmp_path_factory.mktemp("worlds")
    names = [str(directory / side) for side in ("en", "de")]
    for side, name in enumerate(names):
        Path(name).write_text("".join(pair[side] + "\n" for pair in phrases[:120]))
    files = open_pairs([names[0]], [names[1]])
    corpus = index_corpus(files, Reading(subwords, subwords, recipe_of(1).data), io.StringIO())
    return Texts(subwords, subwords, corpus, ValidationText([], [], []))


def recipe_of(update_pieces: int, weight: float = 1.0, micro_batch: int = 1) -> Recipe:
    return load_recipe(None, "tiny", (
        f"train.update_pieces={update_pieces}", f"data.weights=[{weight}]", f"data.micro_batch={micro_batch}",
        "subwords.sampling=0.3", "data.src=a", "data.tgt=b",
    ))  # fmt: skip


def samples_of(readers: list[UpdateReader], place: object) -> list[Sample]:
    """The samples of an update on all ranks: the key of each, which follows from its pair, and its pieces."""
    return sorted(
        (int(key), tuple(src[:num_src].tolist()), tuple(tgt[:num_tgt].tolist()))
        for reader in readers
        for micro in reader[place].micro_batches
        for key, src, num_src, tgt, num_tgt in zip(
            micro.keys, micro.src, micro.src_lengths, micro.tgt, micro.tgt_lengths, strict=True
        )
        if num_tgt  # a row that fills a micro-batch up says nothing
    )


@given(
    st.integers(40, 3000), st.sampled_from([0.5, 1.0, 2.3]), st.integers(30, 2000),
    st.lists(st.integers(1, 7), min_size=4, max_size=4),
)  # fmt: skip
@settings(max_examples=15)
def test_one_two_three_two_ranks_lose_no_sample_and_repeat_none(
    texts: Texts, update_pieces: int, weight: float, micro_batch: int, stretches: list[int]
):
    recipe = recipe_of(update_pieces, weight, micro_batch)
    straight = list(islice(places(texts.corpus, recipe, 0, 0, 0), sum(stretches)))
    alone = [UpdateReader(texts, recipe, World(), 10**9)]
    update, epoch, update_of_epoch = 0, 0, 0
    for size, num in zip((1, 2, 3, 2), stretches, strict=True):
        readers = [UpdateReader(texts, recipe, World(rank, size), micro_batch) for rank in range(size)]
        for place in islice(places(texts.corpus, recipe, update, epoch, update_of_epoch), num):
            expected = straight[update]
            assert (place.update, place.epoch) == (expected.update, expected.epoch)
            assert place.rows.tolist() == expected.rows.tolist()
            samples = samples_of(readers, place)
            assert len(samples) == len(place.rows)
            assert samples == samples_of(alone, expected)
            # what a checkpoint keeps of the place, from which the next stretch goes on
            update, epoch, update_of_epoch = place.update + 1, place.epoch, place.update_of_epoch + 1
