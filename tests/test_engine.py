import pytest
import torch

from diglot.batching import pad
from diglot.config import ModelConfig, SearchConfig
from diglot.corpus import read_lines
from diglot.engines.torch import TorchEngine
from diglot.model import Transformer, padding_mask
from diglot.subwords import learn

PAD, EOS, PIECES = 0, 1, 100
UNWRITABLE = (PAD, 2, 3)
CONFIGS = {
    "greedy": SearchConfig(method="greedy", max_extra=3),
    "beam": SearchConfig(method="beam", beam_size=4, num_best=4, max_extra=3),
    "sample": SearchConfig(method="sample", num_best=2, max_extra=3),
}


def random_model(seed=1, num_pieces=PIECES, **options):
    """A network that was never trained, but writes many different pieces and ends now and then."""
    torch.manual_seed(seed)
    config = ModelConfig(d_model=32, d_ff=64, num_heads=4, num_encoder_layers=2, num_decoder_layers=2,
                         tie="none", output_bias=True, **options)  # fmt: skip
    model = Transformer(config, num_pieces, num_pieces)
    with torch.no_grad():
        model.output.weight.normal_(std=0.5)
        model.output.bias.normal_()[EOS] = 2
    return model


def engine_of(*models, bf16=False, unwritable=UNWRITABLE):
    return TorchEngine(models, pad_id=PAD, eos_id=EOS, unwritable=unwritable, bf16=bf16)


def random_sources(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, PIECES, (length,), generator=generator).tolist() for length in lengths]


def various_sources(num, seed=1):
    lengths = torch.randint(1, 34, (num,), generator=torch.Generator().manual_seed(seed))
    return random_sources(lengths.tolist(), seed)


def in_batches(engine, sources, config, size):
    found = []
    for i in range(0, len(sources), size):
        found += engine.search(sources[i : i + size], config, seeds=range(i, i + len(sources[i : i + size])))
    return found


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_translation_and_its_score_do_not_depend_on_the_batch(method, bf16):
    engine, config = engine_of(random_model(), bf16=bf16), CONFIGS[method]
    sources = various_sources(64)
    found = in_batches(engine, sources, config, 64)
    assert len({hypotheses[0].pieces for hypotheses in found}) > 48  # that there is something to tell apart
    assert in_batches(engine, sources[:21], config, 7) == found[:21]  # to the last bit
    assert in_batches(engine, sources[:5], config, 1) == found[:5]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    assert engine.search([sources[i] for i in order], config, seeds=order) == [found[i] for i in order]


@pytest.mark.slow
@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("bf16", [False, True])
def test_real_text_is_translated_and_scored_alike_in_batches_of_any_size_and_order(method, bf16, data):
    sides = [read_lines(data / "europarl_en_de" / f"valid.{language}")[:64] for language in ("en", "de")]
    subwords = learn((line for side in sides for line in side), 2000)
    sources, targets = (subwords.encode_all(side) for side in sides)
    assert min(map(len, sources)) < 16 < 48 < max(map(len, sources))  # of several padded lengths
    model = random_model(num_pieces=subwords.num_pieces)
    engine = TorchEngine([model], pad_id=subwords.pad_id, eos_id=subwords.eos_id, unwritable=subwords.unwritable(),
                         bf16=bf16)  # fmt: skip
    config, num = CONFIGS[method], len(sources)
    found, scores = in_batches(engine, sources, config, 64), engine.score(sources, targets)
    assert len({hypotheses[0].pieces for hypotheses in found}) > 48
    for size, upto in ((7, 35), (1, 12)):
        assert in_batches(engine, sources[:upto], config, size) == found[:upto]  # to the last bit
        for i in range(0, upto, size):
            assert engine.score(sources[i : i + size], targets[i : i + size]) == scores[i : i + size]
    order = torch.randperm(num, generator=torch.Generator().manual_seed(1)).tolist()
    assert engine.search([sources[i] for i in order], config, seeds=order) == [found[i] for i in order]
    assert engine.score([sources[i] for i in order], [targets[i] for i in order]) == [scores[i] for i in order]


@pytest.mark.parametrize("method", CONFIGS)
def test_a_translation_does_not_depend_on_how_much_fits_in_memory(method, monkeypatch):
    engine, config, sources = engine_of(random_model()), CONFIGS[method], various_sources(9)
    found = engine.search(sources, config)
    scores = engine.score(sources, sources)
    for name, bound in (("MAX_ROWS", 13), ("MAX_PIECES", 100), ("MAX_PIECES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(f"diglot.engines.torch.{name}", bound)
            assert engine.search(sources, config) == found
            assert engine.score(sources, sources) == scores


@pytest.mark.parametrize("method", CONFIGS)
def test_a_source_alone_is_translated_as_among_others_whatever_its_length(method):
    engine, sources = engine_of(random_model()), random_sources(range(1, 101))
    found = engine.search(sources, CONFIGS[method])
    for length in (1, 14, 15, 16, 31, 32, 100):
        (alone,) = engine.search([sources[length - 1]], CONFIGS[method])
        assert alone == found[length - 1]
        assert all(len(h.pieces) <= length + 3 for h in alone)


def scores_by_definition(models, source, target):
    """The sum over the pieces, and the end, of the log of the models' mean probability; no batch, no padding."""
    src, tgt = torch.tensor([[*source, EOS]]), torch.tensor([[*target, EOS]])
    src_mask = torch.ones_like(src, dtype=torch.bool)
    with torch.no_grad():
        probs = [model.eval().project(model(src, src_mask, tgt))[0].softmax(-1) for model in models]
    return torch.stack(probs).mean(0).gather(1, tgt[0, :, None]).log().sum().item()


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_the_score_that_is_reported_is_the_score_of_scoring(method, positions):
    model = random_model(positions=positions)
    engine, sources = engine_of(model), various_sources(20)
    pairs = [
        (source, h)
        for source, hypotheses in zip(sources, engine.search(sources, CONFIGS[method]), strict=True)
        for h in hypotheses
    ]
    scores = engine.score([source for source, _ in pairs], [h.pieces for _, h in pairs])
    assert [h.log_prob for _, h in pairs] == pytest.approx(scores, abs=1e-4)
    expected = [scores_by_definition([model], source, h.pieces) for source, h in pairs]
    assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_score_of_a_pair_does_not_depend_on_the_batch(bf16):
    model, sources, targets = random_model(), various_sources(20), various_sources(20, seed=2)
    exact = engine_of(model).score(sources, targets)
    engine = engine_of(model, bf16=bf16)
    scores = engine.score(sources, targets)
    assert scores == pytest.approx(exact, rel=0.02 if bf16 else 0)
    alone = [engine.score([source], [target])[0] for source, target in zip(sources, targets, strict=True)]
    assert alone == scores


@pytest.mark.parametrize("method", CONFIGS)
def test_unwritable_pieces_never_come_out(method):
    sources = various_sources(20)

    def pieces_written(engine):
        return {piece for found in engine.search(sources, CONFIGS[method]) for h in found for piece in h.pieces}

    free = pieces_written(engine_of(random_model(), unwritable=()))
    forbidden = tuple(sorted(free)[::2])
    assert not pieces_written(engine_of(random_model(), unwritable=forbidden)) & set(forbidden)


def test_greedy_search_takes_the_most_probable_piece_of_the_whole_network():
    model, sources = random_model().eval(), various_sources(8)
    for source, (h,) in zip(sources, engine_of(model, unwritable=()).search(sources, CONFIGS["greedy"]), strict=True):
        src, lengths = (torch.from_numpy(array) for array in pad([[*source, EOS]], PAD))
        tgt = torch.tensor([[*h.pieces, EOS]])
        best = model.project(model(src, padding_mask(lengths), tgt)).argmax(-1)[0].tolist()
        assert best[:-1] == list(h.pieces)
        assert best[-1] == EOS or h.hit_bound


@pytest.mark.parametrize("method", CONFIGS)
def test_a_prefix_is_kept_and_counted(method):
    engine, sources = engine_of(random_model()), various_sources(6)
    prefixes = [[], [7], [8, 9, 10], [], [11, 12], [13] * 20]
    found = engine.search(sources, CONFIGS[method], prefixes)
    for source, prefix, hypotheses in zip(sources, prefixes, found, strict=True):
        for h in hypotheses:
            assert h.pieces[: len(prefix)] == tuple(prefix)
            assert len(h.pieces) <= len(source) + 3 + len(prefix)
            assert h.log_prob == pytest.approx(engine.score([source], [h.pieces])[0], abs=1e-4)
        assert engine.search([source], CONFIGS[method], [prefix]) == [hypotheses]


@pytest.mark.parametrize("method", CONFIGS)
def test_a_prefix_is_kept_even_where_it_holds_what_the_model_may_not_write(method):
    engine, sources = engine_of(random_model()), various_sources(3)
    for hypotheses in engine.search(sources, CONFIGS[method], [[7, UNWRITABLE[1], 9]] * 3):
        assert hypotheses
        assert all(h.pieces[:3] == (7, UNWRITABLE[1], 9) for h in hypotheses)


@pytest.mark.parametrize("method", CONFIGS)
def test_an_ensemble_of_one_model_twice_is_the_model(method):
    model, sources = random_model(), various_sources(20)
    one = engine_of(model).search(sources, CONFIGS[method])
    two = engine_of(model, model).search(sources, CONFIGS[method])
    for hypotheses, others in zip(one, two, strict=True):
        assert [h.pieces for h in hypotheses] == [h.pieces for h in others]
        assert [h.log_prob for h in hypotheses] == pytest.approx([h.log_prob for h in others], abs=1e-4)


def test_an_ensemble_scores_by_the_mean_of_probabilities():
    models = [random_model(seed, norm=norm) for seed, norm in ((1, "post"), (2, "pre"), (3, "post"))]
    engine, sources, targets = engine_of(*models), various_sources(8), various_sources(8, seed=2)
    expected = [scores_by_definition(models, source, target) for source, target in zip(sources, targets, strict=True)]
    assert engine.score(sources, targets) == pytest.approx(expected, abs=1e-3)
    for source, hypotheses in zip(sources, engine.search(sources, CONFIGS["beam"]), strict=True):
        best = hypotheses[0]
        assert best.log_prob == pytest.approx(scores_by_definition(models, source, best.pieces), abs=1e-4)


def test_learned_positions_serve_to_the_last_one():
    engine = engine_of(random_model(positions="learned", max_positions=20))
    (source,) = random_sources([19])  # and its end
    (found,) = engine.search([source], CONFIGS["beam"])
    assert all(len(h.pieces) + 1 <= 20 for h in found)
    assert engine.score([source], [found[0].pieces]) == pytest.approx([found[0].log_prob], abs=1e-4)


def test_an_engine_leaves_its_model_alone():
    model = random_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = engine_of(model, bf16=True)
    engine.search(various_sources(3), CONFIGS["greedy"])
    assert model.training
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("method", CONFIGS)
def test_nothing_in_nothing_out(method):
    engine = engine_of(random_model())
    assert engine.search([], CONFIGS[method]) == []
    assert engine.score([], []) == []
    ((empty, *_),) = engine.search([[]], CONFIGS[method])  # no piece but the end
    assert len(empty.pieces) <= 3
