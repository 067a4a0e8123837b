"""How well a line through the hidden states of each layer gives the code that was fed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback.ridge import Moments, Readout
from prismlm.instruments.uncertainty_feedback.signal import (
    Codes,
    different,
    evaluating_feedback,
    feedback_of,
    no_codes,
    permuted,
    read_logits,
    run,
    stacked,
    text_batches,
)
from prismlm.instruments.uncertainty_feedback.verdict_words import CONSTANT, of_texts, with_interval
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEST_SHARE = 1 / 3
EXPECTED_DEPTH = 2 / 3
CODE, SHUFFLED, NEXT = range(3)


@dataclass(frozen=True)
class LayerProbe:
    """R² on texts that the probe was not fitted on.

    Attributes:
        layer: 0 for the embeddings with what was added to them, l for the output of layer l.
        depth: layer / layers.
        code: R² of the code fed in at the position, over levels − 1.
        shuffled: of codes permuted among all positions, the control; near 0.
        without: of the same codes from states where nothing was fed: what the text tells of them.
        added: ``code`` − ``without``, paired by text.
        next_entropy: of the entropy of the prediction that is made at the position.
    """

    layer: int
    depth: float
    code: Interval
    shuffled: Interval
    without: Interval
    added: Interval
    next_entropy: Interval


@dataclass(frozen=True)
class CodeProbe:
    """Probes for the code, layer by layer.

    Attributes:
        fitted_on: texts.
        tested_on: other texts.
        positions: of the fit.
        expected_depth: where the source expects the signal to be read from.
        layers: from the embeddings on.
        codes: different ones.
    """

    fitted_on: int
    tested_on: int
    positions: int
    expected_depth: float
    layers: tuple[LayerProbe, ...]
    codes: int

    @property
    def peak(self) -> LayerProbe:
        """Where R² of the code is largest; the first of several."""
        # Nothing is larger or smaller than NaN.
        return max(self.layers, key=lambda one: np.nan_to_num(one.code.value, nan=-np.inf))

    @property
    def verdict(self) -> str:
        """What it says, in a sentence."""
        best, rest = self.peak, of_texts(self.fitted_on + self.tested_on)
        if self.codes < 2:
            return CONSTANT
        if not np.isfinite([best.code.value, best.shuffled.value]).all():
            return f"Says nothing: R² is no number, as where all codes tested on are one {rest}."
        if not best.code.value > max(0.0, best.shuffled.value) or not best.code.above_zero:
            return f"No layer lets the code be read better than shuffled ones are {rest}."
        said = (
            f"The code is read best at depth {best.depth:.2f} (layer {best.layer} of "
            f"{len(self.layers) - 1}; about {self.expected_depth:.2f} is expected), R² "
            f"{best.code.value:.3f}"
        )
        if not best.added.above_zero:
            return (
                f"{said}; where nothing is fed it is {best.without.value:.3f}, so that the text "
                f"tells it as well {rest}."
            )
        return f"{said}, {with_interval(best.added, 3)} more than the text alone tells {rest}."


def code_probe(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    codes: Codes,
    *,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> CodeProbe:
    """Fit a ridge regression from each layer's states to the code, and test it on other texts.

    A third of the texts, drawn from the seed, are tested on. States are those that the model gives
    as ``hidden_states``: in most families the last has passed the final norm. The first token of a
    text has no code and is left out.

    Source: PRISMA, which expects the signal "approximately two-thirds through the network";
    the probe and its controls are ours.

    Raises:
        InputError: a model without feedback or hidden states, or fewer than four texts.
    """
    if len(texts) < 4:
        raise InputError(
            f"{len(texts)} texts: a probe is fitted on some and tested on others, at least 4."
        )
    order = np.random.default_rng(seed).permutation(len(texts))
    tested = order[: max(2, round(TEST_SHARE * len(texts)))]
    mixed = permuted(codes, seed + 1)
    levels = feedback_of(model).embedding.levels
    fed = _LayerStates(model, texts, codes, codes, mixed, levels, progress)
    bare = _LayerStates(model, texts, no_codes(texts), codes, mixed, levels, progress)
    fitted = [number for number in range(len(texts)) if number not in set(tested.tolist())]
    errors, spreads = fed.read(fitted, tested.tolist())
    errors_bare, _ = bare.read(fitted, tested.tolist())
    layers = tuple(
        _layer(number, len(errors) - 1, errors[number], errors_bare[number], spreads, seed)
        for number in range(len(errors))
    )
    positions = sum(len(texts[number]) - 1 for number in fitted)
    return CodeProbe(len(fitted), len(tested), positions, EXPECTED_DEPTH, layers, different(codes))


class _LayerStates:
    """States of every layer along texts, with what is to be read from them."""

    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[Tensor],
        fed: Codes,
        codes: Codes,
        mixed: Codes,
        levels: int,
        progress: Reporter,
    ) -> None:
        self.model, self.texts, self.fed = model, texts, fed
        self.codes, self.mixed, self.levels = codes, mixed, levels
        self.progress = progress

    def read(self, fitted: list[int], tested: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return squared errors [layers, texts, 3] and squares about the mean [texts, 3]."""
        moments: list[Moments] = []
        for _, states, targets in self._batches(fitted):
            if not moments:
                moments = [Moments(x.shape[-1], targets.shape[-1]) for x in states]
            for own, x in zip(moments, states, strict=True):
                own.add(x.flatten(0, 1), targets.flatten(0, 1))
        probes: list[Readout] = [own.fit() for own in moments]
        place = {number: row for row, number in enumerate(tested)}
        errors = np.zeros((len(probes), len(tested), 3))
        found: dict[int, Tensor] = {}
        for numbers, states, targets in self._batches(tested):
            rows = [place[number] for number in numbers]
            for layer, (probe, x) in enumerate(zip(probes, states, strict=True)):
                read = probe(x.flatten(0, 1)).view_as(targets)
                errors[layer, rows] = ((read - targets) ** 2).sum(1).numpy()
            found |= dict(zip(rows, targets, strict=True))
        mean = torch.cat(list(found.values())).mean(0)
        spreads = [((found[row] - mean) ** 2).sum(0) for row in range(len(tested))]
        return errors, torch.stack(spreads).numpy()

    def _batches(self, chosen: list[int]):  # noqa: ANN202 - numbers, states, targets
        rows = [self.texts[number] for number in chosen]
        with (
            evaluating_feedback(self.model),
            self.progress.task("Reading states", sum(map(len, rows))) as task,
        ):
            for some in text_batches(self.model, rows):
                numbers = [chosen[row] for row in some]
                ids = stacked(self.texts, numbers)
                fed = stacked(self.fed, numbers)
                output = run(self.model, ids, fed, output_hidden_states=True)
                if output.get("hidden_states") is None:
                    raise InputError(
                        f"{type(self.model).__name__} gives no hidden_states to probe."
                    )
                states = [x[:, 1:].float().cpu() for x in output["hidden_states"]]
                shares = read_logits(output.logits, ids)[1]
                yield numbers, states, self._targets(numbers, shares)
                task.advance(ids.numel())

    def _targets(self, numbers: list[int], shares: Tensor) -> Float[Tensor, "B T_less_1 3"]:
        codes = [stacked(own, numbers) / (self.levels - 1) for own in (self.codes, self.mixed)]
        return torch.stack([*codes, shares], -1)[:, 1:].double()


def _layer(
    layer: int,
    depth: int,
    errors: Float[np.ndarray, "texts 3"],
    bare: Float[np.ndarray, "texts 3"],
    spreads: Float[np.ndarray, "texts 3"],
    seed: int,
) -> LayerProbe:
    def explained(found: np.ndarray, target: int) -> Interval:
        lost = bootstrap(found[:, target], spreads[:, target], seed=seed)
        return Interval(1 - lost.value, 1 - lost.high, 1 - lost.low)

    return LayerProbe(
        layer,
        layer / max(1, depth),
        explained(errors, CODE),
        explained(errors, SHUFFLED),
        explained(bare, CODE),
        bootstrap(bare[:, CODE] - errors[:, CODE], spreads[:, CODE], seed=seed),
        explained(errors, NEXT),
    )
