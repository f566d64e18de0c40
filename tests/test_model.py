import dataclasses
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import diglot.model
from diglot.config import PRESETS, ModelConfig
from diglot.errors import ConfigError
from diglot.model import (
    Dropout,
    FeedForward,
    MultiHeadAttention,
    PositionalEncoding,
    Transformer,
    attention,
    causal_mask,
    padding_mask,
    positional_encoding,
    prefer_fused,
    read_attention,
)

# Every option of the network with the values that the tests below try: a new option must be added here.
VALUES = {
    "d_model": (16, 24),
    "d_ff": (32, 8),
    "num_heads": (4, 1),
    "d_k": (0, 3),
    "num_encoder_layers": (2, 1, 3),
    "num_decoder_layers": (2, 1, 3),
    "dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.2),
    "ffn_dropout": (0.0, 0.3),
    "norm": ("post", "pre"),
    "positions": ("sinusoidal", "learned"),
    "max_positions": (1024, 9),
    "tie": ("all", "output", "none"),
    "activation": ("relu", "swish", "gelu"),
    "attention_bias": (False, True),
    "output_bias": (False, True),
    "position_base": (10_000.0, 20_000.0),
    "norm_epsilon": (1e-6, 1e-2),
}
EACH_VALUE = [(name, value) for name, values in VALUES.items() for value in values]
PIECES = 50


def small_config(**options):
    return ModelConfig(**{name: values[0] for name, values in VALUES.items()} | options)


def small_model(**options):
    """A small network, of which no parameter is at its initial 0 or 1."""
    torch.manual_seed(1)
    model = Transformer(small_config(**options), PIECES, PIECES).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def batch():
    """Three pairs, the sources of lengths 7, 5 and 1."""
    generator = torch.Generator().manual_seed(2)
    src = torch.randint(PIECES, (3, 7), generator=generator)
    tgt = torch.randint(PIECES, (3, 9), generator=generator)
    return src, padding_mask(torch.tensor([7, 5, 1])), tgt


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------- Options


def test_every_option_and_every_choice_is_listed_here():
    assert {field.name for field in dataclasses.fields(ModelConfig)} == set(VALUES)
    for field in dataclasses.fields(ModelConfig):
        if field.metadata["choices"]:
            assert set(VALUES[field.name]) == set(field.metadata["choices"])


def test_the_defaults_are_the_papers_base_model():
    config = ModelConfig()
    assert (config.d_model, config.d_ff, config.num_heads, config.dropout) == (512, 2048, 8, 0.1)
    assert (config.num_encoder_layers, config.num_decoder_layers) == (6, 6)
    assert (config.norm, config.positions, config.tie, config.activation) == ("post", "sinusoidal", "all", "relu")
    assert (config.d_k, config.attention_dropout, config.ffn_dropout) == (0, 0, 0)
    assert (config.attention_bias, config.output_bias) == (False, False)


@pytest.mark.parametrize(("name", "value"), EACH_VALUE)
def test_decoding_step_by_step_is_decoding_at_once(name, value):
    model, (src, src_mask, tgt) = small_model(**{name: value}), batch()
    with torch.no_grad():
        whole = model(src, src_mask, tgt)
        cache = model.start_cache(model.encode(src, src_mask), src_mask)
        steps = [model.decode_step(None if t == 0 else tgt[:, t - 1], cache) for t in range(tgt.size(1))]
    torch.testing.assert_close(torch.stack(steps, dim=1), whole)


@pytest.mark.parametrize(("name", "value"), EACH_VALUE)
def test_every_parameter_learns(name, value):
    model, (src, src_mask, tgt) = small_model(**{name: value}).train(), batch()
    logits = model.project(model(src, src_mask, tgt))
    F.cross_entropy(logits.flatten(0, 1), tgt.flatten()).backward()
    for name_, parameter in model.named_parameters():
        # a bias of the keys adds the same to all scores of a row, which the softmax does not see
        if not name_.endswith("w_k.bias"):
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0, name_


def test_a_network_that_cannot_be_is_refused():
    for options in ({"d_model": 10, "num_heads": 4}, {"d_model": 9, "num_heads": 3}, {"norm": "both"}):
        with pytest.raises(ConfigError, match="model"):
            ModelConfig(**options)
    with pytest.raises(ValueError, match="one vocabulary"):
        Transformer(small_config(tie="all"), PIECES, PIECES + 1)


def test_the_model_is_read_in_one_sitting():
    assert len(inspect.getsource(diglot.model).splitlines()) <= 500


# ------------------------------------------------------------------- Parameters: Table 3


def closed_form(config, num_pieces):
    """Parameters of the paper's network: one matrix of pieces, N + N layers, no bias in the attention."""
    d, f = config.d_model, config.d_ff
    d_v = d // config.num_heads
    h_k, h_v = config.num_heads * (config.d_k or d_v), config.num_heads * d_v
    attention_ = d * h_k + d * h_k + d * h_v + h_v * d
    feed_forward = d * f + f + f * d + d
    layer_norm = 2 * d
    encoder_layer = attention_ + feed_forward + 2 * layer_norm
    decoder_layer = 2 * attention_ + feed_forward + 3 * layer_norm
    return num_pieces * d + config.num_encoder_layers * encoder_layer + config.num_decoder_layers * decoder_layer


def count_at_paper_size(**options):
    """Counted by the code, in no memory."""
    config = ModelConfig(**options)
    with torch.device("meta"):
        count = num_parameters(Transformer(config, 37000, 37000))
    assert count == closed_form(config, 37000)
    return count


def test_base_and_big_have_the_papers_parameters():
    assert count_at_paper_size() == 63_045_632  # 37,000 pieces is the paper's round figure for its vocabulary
    assert round(count_at_paper_size(**PRESETS["big"]["model"]) / 1e6, 1) == 214.2


@pytest.mark.parametrize(
    ("options", "millions"),
    [
        ({"d_k": 16}, 58),
        ({"d_k": 32}, 60),
        ({"num_encoder_layers": 2, "num_decoder_layers": 2}, 36),
        ({"num_encoder_layers": 4, "num_decoder_layers": 4}, 50),
        ({"num_encoder_layers": 8, "num_decoder_layers": 8}, 80),
        ({"d_ff": 1024}, 53),
        ({"d_ff": 4096}, 90),
    ],
)
def test_variations_differ_from_base_as_in_table_3(options, millions):
    difference = (count_at_paper_size(**options) - count_at_paper_size()) / 1e6
    assert abs(difference - (millions - 65)) < 1  # both figures of the paper are rounded


@pytest.mark.parametrize(
    ("tie", "num_src_pieces", "matrices"),
    [("all", 50, 50), ("output", 50, 50 + 50), ("output", 70, 70 + 50), ("none", 70, 70 + 50 + 50)],
)
def test_tie_says_how_many_matrices_there_are(tie, num_src_pieces, matrices):
    config = small_config(tie=tie)
    model = Transformer(config, num_src_pieces, 50)
    assert num_parameters(model) == closed_form(config, matrices)
    assert (model.src_embedding.weight is model.tgt_embedding.weight) == (tie == "all")
    assert (model.output.weight is model.tgt_embedding.weight) == (tie != "none")


def test_other_options_add_the_parameters_they_say():
    base = num_parameters(small_model())
    d = VALUES["d_model"][0]
    assert num_parameters(small_model(output_bias=True)) == base + PIECES
    assert num_parameters(small_model(attention_bias=True)) == base + 6 * 4 * d  # 2 + 2 * 2 attentions
    assert num_parameters(small_model(norm="pre")) == base + 2 * 2 * d  # a norm at each stack's end
    assert num_parameters(small_model(positions="learned", max_positions=9)) == base + 2 * 9 * d
    for name in (
        "activation",
        "dropout",
        "attention_dropout",
        "ffn_dropout",
        "max_positions",
        "position_base",
        "norm_epsilon",
    ):
        assert {num_parameters(small_model(**{name: value})) for value in VALUES[name]} == {base}


# ------------------------------------------------------------------- Equations


def reference_of(model, activation):
    """torch.nn.Transformer with the same weights, and no norm at the end of a stack unless the model has one."""
    c = model.config
    options = {
        "d_model": c.d_model, "nhead": c.num_heads, "dim_feedforward": c.d_ff, "dropout": 0.0, "activation": activation,
        "layer_norm_eps": c.norm_epsilon, "batch_first": True, "norm_first": c.norm == "pre",
    }  # fmt: skip
    ends = [nn.LayerNorm(c.d_model, c.norm_epsilon) if c.norm == "pre" else None for _ in range(2)]
    encoder_layer, decoder_layer = nn.TransformerEncoderLayer(**options), nn.TransformerDecoderLayer(**options)
    encoder = nn.TransformerEncoder(encoder_layer, c.num_encoder_layers, ends[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(decoder_layer, c.num_decoder_layers, ends[1])
    reference = nn.Transformer(c.d_model, c.num_heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)

    def copy(theirs, ours):
        theirs.load_state_dict(ours.state_dict())

    def copy_attention(theirs, ours):
        projections = (ours.w_q, ours.w_k, ours.w_v)
        theirs.in_proj_weight.copy_(torch.cat([w.weight for w in projections]))
        theirs.out_proj.weight.copy_(ours.w_o.weight)
        if c.attention_bias:
            theirs.in_proj_bias.copy_(torch.cat([w.bias for w in projections]))
            theirs.out_proj.bias.copy_(ours.w_o.bias)
        else:
            theirs.in_proj_bias.zero_()
            theirs.out_proj.bias.zero_()

    with torch.no_grad():
        for theirs, ours in zip((*encoder.layers, *decoder.layers), (*model.encoder.layers, *model.decoder.layers),
                                strict=True):  # fmt: skip
            copy_attention(theirs.self_attn, ours.self_attention)
            copy(theirs.linear1, ours.feed_forward.w_1)
            copy(theirs.linear2, ours.feed_forward.w_2)
            copy(theirs.norm1, ours.residual_1.norm)
            copy(theirs.norm2, ours.residual_2.norm)
            if hasattr(ours, "cross_attention"):
                copy_attention(theirs.multihead_attn, ours.cross_attention)
                copy(theirs.norm3, ours.residual_3.norm)
        if c.norm == "pre":
            copy(encoder.norm, model.encoder.norm)
            copy(decoder.norm, model.decoder.norm)
    return reference


def encoding_by_hand(num_positions, d_model, base=10000):
    """3.5, as the paper writes it."""
    table = torch.zeros(num_positions, d_model)
    for pos in range(num_positions):
        for i in range(d_model // 2):
            table[pos, 2 * i] = math.sin(pos / base ** (2 * i / d_model))
            table[pos, 2 * i + 1] = math.cos(pos / base ** (2 * i / d_model))
    return table


@pytest.mark.parametrize("tie", VALUES["tie"])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize(
    ("norm", "activation", "theirs"),
    [("post", "relu", "relu"), ("post", "gelu", "gelu"), ("post", "swish", F.silu), ("pre", "relu", "relu")],
)
def test_the_network_is_nn_transformer(norm, activation, theirs, attention_bias, tie):
    model = small_model(norm=norm, activation=activation, attention_bias=attention_bias, tie=tie,
                        num_encoder_layers=3)  # fmt: skip
    src, src_mask, tgt = batch()
    d = model.config.d_model
    x = model.src_embedding.weight[src] * math.sqrt(d) + encoding_by_hand(src.size(1), d)
    shifted = torch.cat((torch.zeros(3, 1, d), model.tgt_embedding.weight[tgt[:, :-1]]), dim=1)
    y = shifted * math.sqrt(d) + encoding_by_hand(tgt.size(1), d)
    expected = reference_of(model, theirs)(
        x, y, tgt_mask=~causal_mask(tgt.size(1)), src_key_padding_mask=~src_mask, memory_key_padding_mask=~src_mask
    )  # fmt: skip
    hidden = model(src, src_mask, tgt)
    torch.testing.assert_close(hidden, expected)
    matrix = {"all": model.src_embedding, "output": model.tgt_embedding, "none": model.output}[tie].weight
    torch.testing.assert_close(model.project(hidden), hidden @ matrix.T)


def test_output_bias_is_added_to_the_logits():
    model, hidden = small_model(output_bias=True), torch.randn(2, 3, 16)
    torch.testing.assert_close(model.project(hidden), hidden @ model.output.weight.T + model.output.bias)


def test_attention_is_scaled_dot_product_attention():
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 5, 6), torch.randn(2, 4, 7, 6), torch.randn(2, 4, 7, 3)
    mask = torch.rand(2, 1, 5, 7) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(attention(q, k, v)[0], F.scaled_dot_product_attention(q, k, v))
    read, weights = attention(q, k, v, mask)
    torch.testing.assert_close(read, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    torch.testing.assert_close(weights @ v, read)


@pytest.mark.parametrize("d_k", VALUES["d_k"])
@pytest.mark.parametrize("num_heads", VALUES["num_heads"])
def test_heads_are_concatenated_attentions(d_k, num_heads):
    look = MultiHeadAttention(small_config(d_k=d_k, num_heads=num_heads))
    d_v = 16 // num_heads
    width = d_k or d_v
    assert look.w_q.weight.shape == look.w_k.weight.shape == (num_heads * width, 16)
    assert look.w_v.weight.shape == look.w_o.weight.shape == (16, 16)
    x, memory, mask = torch.randn(2, 5, 16), torch.randn(2, 7, 16), padding_mask(torch.tensor([7, 3]))[:, None, :]
    heads = []
    for i in range(num_heads):
        of_keys, of_values = slice(i * width, (i + 1) * width), slice(i * d_v, (i + 1) * d_v)
        q, k = x @ look.w_q.weight[of_keys].T, memory @ look.w_k.weight[of_keys].T
        scores = (q @ k.mT / math.sqrt(width)).masked_fill(~mask, -math.inf)
        heads.append(scores.softmax(-1) @ (memory @ look.w_v.weight[of_values].T))
    torch.testing.assert_close(look(x, memory, mask[:, None]), torch.cat(heads, dim=-1) @ look.w_o.weight.T)


@pytest.mark.parametrize("with_mask", [False, True])
def test_the_fused_and_the_explicit_path_agree(with_mask):
    look = MultiHeadAttention(small_config(d_model=8, num_heads=2))
    lengths = torch.tensor([140, 100])
    x, mask = torch.randn(2, 140, 8), padding_mask(lengths)[:, None, None, :] if with_mask else None
    long, short = torch.empty(1, 1, 140, 4), torch.empty(1, 1, 128, 4)
    assert prefer_fused(long, long)
    assert not prefer_fused(short, short)
    results = []
    for reader in (None, lambda weights: None):  # weights that are read are computed
        look.reader = reader
        leaf = x.clone().requires_grad_()
        read = look(leaf, leaf, mask)
        read.square().sum().backward()
        results.append((read.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "equation"),
    [
        ("relu", lambda x: max(0.0, x)),
        ("swish", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    ],
)
def test_feed_forward_is_equation_2(activation, equation):
    layer, x = FeedForward(small_config(activation=activation)), torch.randn(2, 3, 16)
    inner = (x @ layer.w_1.weight.T + layer.w_1.bias).double()
    inner = torch.tensor([equation(value) for value in inner.flatten().tolist()]).view(inner.shape)
    torch.testing.assert_close(layer(x), inner @ layer.w_2.weight.T + layer.w_2.bias)


def test_positional_encoding_is_the_papers():
    torch.testing.assert_close(positional_encoding(200, 10), encoding_by_hand(200, 10))


def test_the_base_of_the_positions_is_the_models():
    positions = PositionalEncoding(small_config(position_base=500.0, max_positions=2))
    torch.testing.assert_close(positions(torch.zeros(1, 9, 16))[0], encoding_by_hand(9, 16, base=500))


@pytest.mark.parametrize("k", [1, 7, 50])
def test_a_shift_turns_each_pair_of_sinusoids_by_one_angle(k):
    d = 64
    table = positional_encoding(200, d).double()
    sine, cosine = table[:, 0::2], table[:, 1::2]
    angle = k / 10000 ** (torch.arange(0, d, 2).double() / d)  # of each pair, at every position
    shifted = torch.stack((sine * angle.cos() + cosine * angle.sin(), cosine * angle.cos() - sine * angle.sin()), -1)
    torch.testing.assert_close(shifted[:-k].flatten(1), table[k:], rtol=0, atol=1e-6)


def test_the_longest_wavelength_is_a_step_short_of_ten_thousand_turns():
    first = positional_encoding(2, 512)[1].double()  # sin and cos of the angle from one position to the next
    wavelengths = 2 * math.pi / torch.atan2(first[0::2], first[1::2])
    ratios = wavelengths[1:] / wavelengths[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-4, atol=0)
    assert wavelengths[0].item() == pytest.approx(2 * math.pi)
    assert wavelengths[-1].item() == pytest.approx(9647 * 2 * math.pi, rel=1e-4)


def test_initial_values_are_those_of_tensor2tensor():
    torch.manual_seed(1)
    model = Transformer(ModelConfig(d_model=64, d_ff=256, attention_bias=True), 1000, 1000)
    assert model.src_embedding.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
    w_1 = model.encoder.layers[0].feed_forward.w_1
    assert w_1.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (64 + 256)), rel=0.01)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert all((module.weight == 1).all() for module in model.modules() if isinstance(module, nn.LayerNorm))


# ------------------------------------------------------------------- Positions


def test_sinusoids_go_on_beyond_their_table():
    config = small_config(max_positions=4)
    positions = PositionalEncoding(config)
    x = torch.zeros(1, 3, 16)
    torch.testing.assert_close(positions(x, offset=30)[0], encoding_by_hand(33, 16)[30:])
    torch.testing.assert_close(positions(x)[0], encoding_by_hand(3, 16))


def test_learned_positions_are_added_and_end():
    positions = PositionalEncoding(small_config(positions="learned", max_positions=9))
    x = torch.randn(2, 4, 16)
    torch.testing.assert_close(positions(x, offset=5), x + positions.table[5:9])
    with pytest.raises(ValueError, match="position 10 is beyond the 9"):
        positions(x, offset=6)


def test_only_learned_positions_are_stored():
    assert not [name for name in small_model().state_dict() if "positions" in name]
    stored = small_model(positions="learned").state_dict()
    assert {name for name in stored if "positions" in name} == {"src_positions.table", "tgt_positions.table"}


# ------------------------------------------------------------------- Invariants


@pytest.mark.parametrize("norm", VALUES["norm"])
@pytest.mark.parametrize("length", [9, 140])  # the explicit product and the fused kernel
def test_a_future_piece_changes_no_hidden_state(norm, length):
    model = small_model(norm=norm)
    src, src_mask, _ = batch()
    tgt = torch.randint(PIECES, (3, length))
    hidden = model(src, src_mask, tgt)
    for t in (0, length // 2, length - 2):
        changed = tgt.clone()
        changed[:, t:] = (changed[:, t:] + 1) % PIECES
        other = model(src, src_mask, changed)
        torch.testing.assert_close(other[:, : t + 1], hidden[:, : t + 1], rtol=0, atol=0)
        assert (other[:, t + 1] != hidden[:, t + 1]).any()


@pytest.mark.parametrize("norm", VALUES["norm"])
def test_padding_of_the_source_changes_nothing(norm):
    model, (src, src_mask, tgt) = small_model(norm=norm), batch()
    hidden = model(src, src_mask, tgt)
    garbage = torch.where(src_mask, src, (src + 1) % PIECES)
    torch.testing.assert_close(model(garbage, src_mask, tgt), hidden, rtol=0, atol=0)
    longer, longer_mask = F.pad(src, (0, 30), value=3), F.pad(src_mask, (0, 30))
    torch.testing.assert_close(model(longer, longer_mask, tgt), hidden)
    for i, length in enumerate(src_mask.sum(1).tolist()):
        alone = model(src[i : i + 1, :length], src_mask[i : i + 1, :length], tgt[i : i + 1])
        torch.testing.assert_close(alone, hidden[i : i + 1])


def test_a_piece_of_the_source_changes_every_hidden_state():
    model, (src, src_mask, tgt) = small_model(), batch()
    changed = src.clone()
    changed[:, 0] = (changed[:, 0] + 1) % PIECES
    assert (model(src, src_mask, tgt) != model(changed, src_mask, tgt)).any(-1).all()


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_the_cache_may_be_repeated_reordered_and_dropped(seed):
    model, (src, src_mask, _) = small_model(), batch()
    generator = torch.Generator().manual_seed(seed)
    memory = model.encode(src, src_mask)
    cache = model.start_cache(memory, src_mask)
    owners, history, last = torch.arange(3), torch.zeros(3, 0, dtype=torch.long), None
    for _ in range(8):
        hidden = model.decode_step(last, cache)
        whole = F.pad(history, (0, 1))  # the piece to come is not looked at
        torch.testing.assert_close(hidden, model.decode(whole, memory[owners], src_mask[owners])[:, -1])
        num_rows = int(torch.randint(1, 6, (), generator=generator))
        parents = torch.randint(len(owners), (num_rows,), generator=generator)
        last = torch.randint(PIECES, (num_rows,), generator=generator)
        cache.select(parents)
        owners, history = owners[parents], torch.cat((history[parents], last[:, None]), dim=1)
        assert len(cache.owners) == num_rows


# ------------------------------------------------------------------- Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
def test_dropout_keeps_the_mean_and_its_share(p):
    torch.manual_seed(1)
    x = torch.ones(100_003)
    y = Dropout(p)(x)
    share = (y == 0).double().mean().item()
    deviation = math.sqrt(p * (1 - p) / len(x))
    assert abs(share - p) < 4 * deviation
    assert y.mean().item() == pytest.approx(1, abs=4 * deviation / (1 - p))
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_dropout_follows_from_the_seed():
    dropout, x = Dropout(0.5), torch.ones(3, 7, 5)

    def draw(seed):
        torch.manual_seed(seed)
        return dropout(x)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    torch.manual_seed(1)
    assert not torch.equal(dropout(x), dropout(x))


KEYED = [(0.1, (6, 11, 16)), (0.3, (6, 4, 5, 7)), (0.5, (6, 9, 3))]


@pytest.mark.parametrize(("p", "shape"), KEYED)
def test_what_is_dropped_of_a_sample_follows_from_its_key_alone(p, shape):
    dropout, keys = Dropout(p), torch.randint(-(2**62), 2**62, shape[:1])
    dropout.keys = keys
    together = dropout(torch.ones(shape))
    for i in range(shape[0]):  # alone, and padded further
        dropout.keys = keys[i : i + 1]
        wider = dropout(torch.ones(1, *(length + 5 for length in shape[1:-1]), shape[-1] + 8))
        assert torch.equal(wider[0][tuple(slice(0, length) for length in shape[1:])], together[i])
    dropout.keys = keys + 1
    assert not torch.equal(dropout(torch.ones(shape)), together)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_dropout_by_keys_keeps_its_share_and_has_no_pattern(p):
    dropout = Dropout(p)
    dropout.keys = torch.arange(1000)  # poor keys, one beside the other
    dropped = (dropout(torch.ones(1000, 5, 64)) == 0).double()
    num = dropped.numel()
    deviation = math.sqrt(p * (1 - p) / num)
    assert abs(dropped.mean().item() - p) < 4 * deviation
    for axis in range(3):
        others = [a for a in range(3) if a != axis]
        share = dropped.mean(others)
        assert (share - p).abs().max() < 5 * deviation * math.sqrt(len(share))
    dropout.keys += 1 << 40
    other = (dropout(torch.ones(1000, 5, 64)) == 0).double()
    neighbours = [
        (dropped[:, :, 1:], dropped[:, :, :-1]), (dropped[:, :, 4:], dropped[:, :, :-4]),
        (dropped[:, 1:], dropped[:, :-1]), (dropped[1:], dropped[:-1]), (dropped, other),
    ]  # fmt: skip
    for one, two in neighbours:
        both = (one * two).mean().item()
        assert abs(both - p * p) < 5 * p * math.sqrt(1 / one.numel())


def test_each_layer_drops_other_places():
    model, (src, src_mask, tgt) = small_model(dropout=0.5), batch()
    masks = []
    for dropout in model.dropouts:
        dropout.register_forward_hook(lambda module, args, output: masks.append((output == 0)[:, :7]))
    model.train()(src, src_mask, tgt, torch.arange(3))
    masks = [mask for mask in masks if mask.shape == masks[0].shape]
    assert len(masks) > 5
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_dropouts_gradient_has_the_same_mask():
    x = torch.ones(1000, requires_grad=True)
    y = Dropout(0.3)(x)
    (2 * y).sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach())


def test_dropout_is_the_identity_out_of_training():
    x = torch.randn(4, 4)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x


N, M = 2, 3  # layers of the encoder and of the decoder
SRC, TGT = (3, 7, 16), (3, 9, 16)


@pytest.mark.parametrize(
    ("rate", "where"),
    [
        ({"dropout": 0.1}, [SRC] * (1 + 2 * N) + [TGT] * (1 + 3 * M)),  # the sums of embeddings too
        ({"ffn_dropout": 0.1}, [(3, 7, 32)] * N + [(3, 9, 32)] * M),
        ({"attention_dropout": 0.1}, [(3, 4, 7, 7)] * N + [(3, 4, 9, 9), (3, 4, 9, 7)] * M),
    ],
)
def test_each_rate_of_dropout_acts_at_its_place_and_in_training_alone(rate, where):
    model = small_model(num_encoder_layers=N, num_decoder_layers=M, **rate)
    src, src_mask, tgt = batch()
    shapes = []
    for module in model.modules():
        if isinstance(module, Dropout) and module.p > 0:
            module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    silent = model(src, src_mask, tgt)
    torch.testing.assert_close(model(src, src_mask, tgt), silent, rtol=0, atol=0)
    shapes.clear()
    assert not torch.allclose(model.train()(src, src_mask, tgt), silent)
    assert sorted(shapes) == sorted(where)


def test_the_fused_path_drops_attention_in_training():
    look = MultiHeadAttention(small_config(d_model=8, num_heads=2, attention_dropout=0.5))
    x = torch.randn(1, 140, 8)
    silent = look.eval()(x, x)
    torch.testing.assert_close(look(x, x), silent)
    assert not torch.allclose(look.train()(x, x), silent)


# ------------------------------------------------------------------- Reading the attention


def test_attention_is_read_of_every_layer_and_head():
    model, (src, src_mask, tgt) = small_model(num_encoder_layers=1, num_decoder_layers=2), batch()
    silent = model(src, src_mask, tgt)
    with read_attention(model) as read:
        hidden = model(src, src_mask, tgt)
    torch.testing.assert_close(hidden, silent, rtol=0, atol=0)
    assert {name: [tuple(weights.shape) for weights in found] for name, found in read.items()} == {
        "encoder.layers.0.self_attention": [(3, 4, 7, 7)],
        "decoder.layers.0.self_attention": [(3, 4, 9, 9)],
        "decoder.layers.0.cross_attention": [(3, 4, 9, 7)],
        "decoder.layers.1.self_attention": [(3, 4, 9, 9)],
        "decoder.layers.1.cross_attention": [(3, 4, 9, 7)],
    }
    for name, (weights,) in read.items():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        is_causal = name.startswith("decoder") and name.endswith("self_attention")
        mask = (causal_mask(9) if is_causal else src_mask[:, None, None, :]).expand_as(weights)
        assert (weights[~mask] == 0).all()
        assert (weights[mask] > 0).all()


def test_weights_that_are_read_are_the_softmax_of_equation_1():
    model, (src, src_mask, _) = small_model(), batch()
    with read_attention(model) as read:
        model.encode(src, src_mask)
    x = model.src_embedding.weight[src] * 4 + encoding_by_hand(7, 16)  # sqrt(16) = 4
    look = model.encoder.layers[0].self_attention
    q, k = x @ look.w_q.weight.T, x @ look.w_k.weight.T
    for head, i in enumerate(range(0, 16, 4)):
        scores = torch.exp(q[..., i : i + 4] @ k[..., i : i + 4].mT / math.sqrt(4)) * src_mask[:, None, :]
        expected = scores / scores.sum(-1, keepdim=True)
        torch.testing.assert_close(read["encoder.layers.0.self_attention"][0][:, head], expected)


def test_attention_is_read_before_its_dropout():
    model, (src, src_mask, tgt) = small_model(attention_dropout=0.5).train(), batch()
    with read_attention(model) as read:
        model(src, src_mask, tgt)
    for (weights,) in read.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_every_step_of_a_search_is_read():
    model, (src, src_mask, tgt) = small_model(num_decoder_layers=1), batch()
    with read_attention(model) as read:
        model(src, src_mask, tgt)
    with read_attention(model) as steps:
        cache = model.start_cache(model.encode(src, src_mask), src_mask)
        for t in range(9):
            model.decode_step(None if t == 0 else tgt[:, t - 1], cache)
    name = "decoder.layers.0.cross_attention"
    torch.testing.assert_close(torch.cat(steps[name], dim=2), read[name][0])


def test_nothing_is_read_when_nobody_looks():
    model, (src, src_mask, tgt) = small_model(), batch()
    looks = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    with pytest.raises(IndexError), read_attention(model) as read:
        model(src + PIECES, src_mask, tgt)
    assert {look.reader for look in looks} == {None}
    model(src, src_mask, tgt)
    assert not any(read.values())
