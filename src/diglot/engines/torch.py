"""The reference engine: runs the network of `model.py` with PyTorch.

A segment's result does not depend on its neighbours. Products of matrices differ in the last bits with the number of
rows, so rows always come in multiples of 16, and only sources of the same padded length share a batch.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from diglot.batching import pad, round_up
from diglot.config import SearchConfig
from diglot.model import Transformer, padding_mask, read_attention
from diglot.search import Hypothesis, Step, beam_search, ensemble, greedy_search, sampling_search

MULTIPLE = 16
MAX_ROWS = 256  # hypotheses at once
MAX_PIECES = 16384  # padded source pieces of all hypotheses at once: this bounds the memory


class TorchEngine:
    """Searches and scores with one model, or with several that share their vocabularies."""

    def __init__(
        self,
        models: Sequence[Transformer],
        *,
        pad_id: int,
        eos_id: int,
        unwritable: Sequence[int] = (),
        device: str = "cpu",
        bf16: bool = False,
    ):
        self.device = torch.device(device)
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.models = [copy.deepcopy(model).to(self.device, dtype).eval() for model in models]
        self.pad_id, self.eos_id = pad_id, eos_id
        self.unwritable = torch.tensor(list(unwritable), dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def search(
        self,
        sources: Sequence[Sequence[int]],
        config: SearchConfig,
        prefixes: Sequence[Sequence[int]] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """The `num_best` hypotheses of each source (pieces without end), best first."""
        prefixes = prefixes or [()] * len(sources)
        seeds = seeds or [config.seed] * len(sources)
        width = {"beam": config.beam_size, "greedy": 1, "sample": config.num_best}[config.method]
        found: list[list[Hypothesis]] = [[] for _ in sources]
        for batch in self.batches([len(source) + 1 for source in sources], width):
            step = self.start([sources[i] for i in batch])
            # 6.1: "the maximum output length during inference to input length + 50"
            bounds = [len(sources[i]) + 1 + config.max_extra + len(prefixes[i]) for i in batch]
            bounds = [min(bound, self.max_length()) for bound in bounds]
            own_prefixes, own_seeds = [prefixes[i] for i in batch], [seeds[i] for i in batch]
            alpha, num_best = config.length_penalty, config.num_best
            if config.method == "beam":
                results = beam_search(
                    step, bounds, self.eos_id, beam_size=config.beam_size, alpha=alpha, num_best=num_best,
                    prefixes=own_prefixes, unwritable=self.unwritable,
                )  # fmt: skip
            elif config.method == "greedy":
                results = greedy_search(
                    step, bounds, self.eos_id, alpha=alpha, prefixes=own_prefixes, unwritable=self.unwritable
                )
            else:
                results = sampling_search(
                    step, bounds, self.eos_id, seeds=own_seeds, temperature=config.temperature, top_k=config.top_k,
                    top_p=config.top_p, alpha=alpha, num_best=num_best, prefixes=own_prefixes,
                    unwritable=self.unwritable,
                )  # fmt: skip
            for i, result in zip(batch, results, strict=True):
                found[i] = result
        return found

    def max_length(self) -> int:
        """Positions that every model can tell apart."""
        learned = [m.config.max_positions for m in self.models if m.config.positions == "learned"]
        return min(learned, default=1 << 30)

    def batches(self, lengths: Sequence[int], width: int, others: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Which sources go together: those of the same padded length (and of the same `others`), so many at once."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, length in enumerate(lengths):
            groups[round_up(length, MULTIPLE), round_up(others[i], MULTIPLE) if others else 0].append(i)
        for (length, other), members in sorted(groups.items(), reverse=True):
            size = max(1, min(MAX_ROWS, MAX_PIECES // max(length, other)) // width)
            yield from (members[i : i + size] for i in range(0, len(members), size))

    def start(self, sources: Sequence[Sequence[int]]) -> Step:
        """Encode sources of one padded length; the answer is the step function of the search."""
        src, src_mask = self.padded(sources)
        return ensemble([self.stepper(model, src, src_mask) for model in self.models])

    def padded(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Pieces with their ends, a multiple of 16 long where the model has the positions, and what is no padding."""
        pieces, lengths = pad([[*sequence, self.eos_id] for sequence in sequences], self.pad_id, MULTIPLE)
        pieces = torch.from_numpy(pieces[:, : max(int(lengths.max()), self.max_length())])
        return pieces.to(self.device), padding_mask(torch.from_numpy(lengths), pieces.size(1)).to(self.device)

    def stepper(self, model: Transformer, src: Tensor, src_mask: Tensor) -> Step:
        """One model's step function."""
        cache = model.start_cache(model.encode(src, src_mask), src_mask)

        def step(last: Tensor | None, parents: Tensor) -> Tensor:
            num = len(parents)
            surplus = round_up(num, MULTIPLE) - num  # rows that only fill up
            parents = torch.cat((parents.to(self.device), parents.new_zeros(surplus).to(self.device)))
            if last is not None:
                last = torch.cat((last.to(self.device), last.new_zeros(surplus).to(self.device)))
            cache.select(parents)
            return model.project(model.decode_step(last, cache)).float().log_softmax(-1)[:num]

        return step

    @torch.inference_mode()
    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[float]:
        """log P(target and its end | source) of each pair."""
        result = [0.0] * len(sources)
        lengths = [[len(sequence) + 1 for sequence in side] for side in (sources, targets)]
        for batch in self.batches(lengths[0], 4, lengths[1]):
            src, src_mask = self.padded([sources[i] for i in batch])
            tgt, tgt_mask = self.padded([targets[i] for i in batch])
            each = torch.stack([self.target_log_probs(model, src, src_mask, tgt) for model in self.models])
            log_probs = each.logsumexp(0) - math.log(len(self.models))  # (B, T)
            sums = cast("list[float]", (log_probs * tgt_mask).sum(1).tolist())
            for i, value in zip(batch, sums, strict=True):
                result[i] = value
        return result

    def target_log_probs(self, model: Transformer, src: Tensor, src_mask: Tensor, tgt: Tensor) -> Tensor:
        """log P of each target piece (B, T), the logits of 16 positions at a time."""
        hidden = model(src, src_mask, tgt)  # (B, T, D)
        parts: list[Tensor] = []
        for start in range(0, tgt.size(1), MULTIPLE):
            log_probs = model.project(hidden[:, start : start + MULTIPLE].contiguous()).float().log_softmax(-1)
            parts.append(log_probs.gather(2, tgt[:, start : start + MULTIPLE, None])[:, :, 0])
        return torch.cat(parts, dim=1)

    def attend(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *, exact: bool = False
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The attention weights of each pair: of the encoder (layers, H, S, S), of the decoder (layers, H, T, T), and
        of the decoder on the encoder (layers, H, T, S).

        `exact`: computed in double precision, so that they are the softmax itself and not a rounding of it.
        """
        model = self.models[0]
        if exact:
            model = copy.deepcopy(model).double()
        found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        lengths = [[len(sequence) + 1 for sequence in side] for side in (sources, targets)]
        for batch in self.batches(lengths[0], 16, lengths[1]):
            src, src_mask = self.padded([sources[i] for i in batch])
            tgt, _ = self.padded([targets[i] for i in batch])
            with torch.inference_mode(), read_attention(model) as weights:
                model(src, src_mask, tgt)
            encoder, decoder, cross = (
                torch.stack([one for name, (one,) in weights.items() if re.fullmatch(rf"{kind}_attention", name)])
                for kind in (r"encoder.*self", r"decoder.*self", r"decoder.*cross")
            )  # (layers, B, H, T, S)
            for row, i in enumerate(batch):
                S, T = lengths[0][i], lengths[1][i]
                found[i] = encoder[:, row, :, :S, :S], decoder[:, row, :, :T, :T], cross[:, row, :, :T, :S]
        return [found[i] for i in range(len(sources))]

    def attribute(self, source: Sequence[int], target: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Gradients times input: how log P of each target piece grows with each embedding it was computed from, those
        of the source (T, S) and those of the decoder's inputs (T, T), of which the first is the start."""
        model = copy.deepcopy(self.models[0]).double()
        inputs: list[Tensor] = []

        def as_input(module: nn.Module, arguments: object, embedded: Tensor) -> Tensor:
            inputs.append(embedded.detach().requires_grad_())
            return inputs[-1]

        for embedding in {model.src_embedding, model.tgt_embedding}:
            embedding.register_forward_hook(as_input)
        src, tgt = (torch.tensor([[*sequence, self.eos_id]], device=self.device) for sequence in (source, target))
        hidden = model(src, torch.ones_like(src, dtype=torch.bool), tgt)
        log_probs = model.project(hidden).log_softmax(-1).gather(2, tgt[:, :, None])[0, :, 0]  # (T,)
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for log_prob in log_probs:
            gradients = torch.autograd.grad(log_prob, inputs, retain_graph=True)
            for side, gradient, embedded in zip(sides, gradients, inputs, strict=True):
                side.append((gradient * embedded).detach().sum(-1)[0])
        of_src, of_tgt = map(torch.stack, sides)
        return of_src, nn.functional.pad(of_tgt, (1, 0))  # the start is the zero vector
