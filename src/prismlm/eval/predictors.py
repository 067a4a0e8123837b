"""lm-eval over prismlm's models: three predictors of one model, and lm-eval's own command line.

    plain            softmax of the logits of z, the model's own
    prototype_only   softmax of the logits of ẑ alone
    residual_only    softmax of the logits of r = z − ẑ alone

Each state goes through the complete logit map, so a bias of the output embedding is part of all
three.
"""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import datasets
import torch
import torch.nn.functional as F
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.errors import InputError
from prismlm.interventions.plan import install
from prismlm.interventions.suppression import Way, using
from prismlm.interventions.values import Controller
from prismlm.layers import PrototypeHead
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.checkpoint import load_checkpoint, read_checkpoint
from prismlm.models.seam import LogitMap, last_states, output_embedding, verify_logit_map
from prismlm.models.sidecar import has_sidecar, load_sidecar
from prismlm.models.uncertainty_feedback import has_uncertainty, load_uncertainty
from prismlm.models.watch import evaluating

# A decorator of lm-eval hides its type.
HuggingFaceLM: Any = HFLM
Predictor = Literal["plain", "prototype_only", "residual_only"]
PREDICTORS: tuple[Predictor, ...] = get_args(Predictor)


class Score(NamedTuple):
    """Of a continuation: Σ log p of its tokens, and whether each is the predictor's top token."""

    log_likelihood: float
    is_greedy: bool


# Tokens of a context and of its continuation.
Encoded = tuple[list[int], list[int]]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logging of lm-eval and the progress bars of datasets."""
    logger, silent = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not silent:
            datasets.enable_progress_bars()


class PredictorLM(HuggingFaceLM):
    """A model for lm-eval's harness, with or without its head.

    One forward pass serves all predictors, with logits only at the positions before each token of
    a continuation; requests with the same tokens share a row. Tokens are those of lm-eval's ``hf``
    model, and sums are in float32 or better. ``predictor`` is the one that lm-eval's own functions
    use, such as ``simple_evaluate``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        logit_map: LogitMap,
        head: PrototypeHead | None = None,
        *,
        predictor: Predictor = "plain",
        batch_size: int = 8,
    ) -> None:
        with quiet():
            super().__init__(
                pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size
            )
        self.head, self.logit_map = head, logit_map
        self.predictor: Predictor = predictor
        self.predictors = PREDICTORS if head is not None else PREDICTORS[:1]
        if predictor not in self.predictors:
            raise InputError(
                f"the predictor is {predictor!r}: expected one of {', '.join(self.predictors)}"
                + (". The others need a prototype head." if head is None else ".")
            )

    def encoded(self, context: str, continuation: str) -> Encoded:
        """Return the tokens of both; an empty context becomes the BOS token."""
        if context:
            before, after = self._encode_pair(context, continuation)
        else:
            before = [self.prefix_token_id]
            after = self.tok_encode(continuation, add_special_tokens=False)
        if not 1 <= len(after) <= self.max_length:
            raise InputError(
                f"the continuation {continuation[:60]!r} has {len(after)} tokens: expected 1 to "
                f"{self.max_length}, the most that this model reads."
            )
        return before, after

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        """Answer lm-eval with :attr:`predictor`."""
        encoded = [(before, after) for _, before, after in requests]
        return [tuple(scores[self.predictor]) for scores in self.score(encoded)]

    def score(
        self, encoded: Sequence[Encoded], advance: Callable[[int], None] = lambda count: None
    ) -> list[dict[Predictor, Score]]:
        """Score continuations after their contexts with every predictor.

        ``advance`` is called with the number of scored pairs after each batch.
        """
        requests: dict[tuple[int, ...], list[int]] = {}
        for number, (before, after) in enumerate(encoded):
            ids = tuple((before + after)[-(self.max_length + 1) : -1])
            requests.setdefault(ids, []).append(number)
        rows = sorted(requests, key=len, reverse=True)
        scores: list[dict[Predictor, Score]] = [{} for _ in encoded]
        size = int(self.batch_size)
        with evaluating(self.model):
            for first in range(0, len(rows), size):
                batch = rows[first : first + size]
                groups = [requests[ids] for ids in batch]
                ends = [max(len(encoded[number][1]) for number in group) for group in groups]
                for predictor, log_p in self._log_probabilities(
                    last_states(self.model, batch, ends)
                ):
                    for group, part in zip(groups, log_p.split(ends), strict=True):
                        for number in group:
                            scores[number][predictor] = _score_end(part, encoded[number][1])
                advance(sum(map(len, groups)))
        return scores

    def _log_probabilities(self, z: Tensor) -> Iterator[tuple[Predictor, Tensor]]:
        """Yield the log softmax [N, V] of every predictor, one at a time to save memory."""
        embedding: Any = output_embedding(self.model)
        states = [z]
        if self.head is not None:
            rebuilt = self.head(z).reconstruction
            states += [rebuilt, z.to(rebuilt.dtype) - rebuilt]
        weight, bias = embedding.weight, getattr(embedding, "bias", None)
        for predictor, state in zip(self.predictors, states, strict=True):
            logits = self.logit_map(F.linear(state.to(weight.dtype), weight, bias).float())
            yield predictor, logits.log_softmax(-1)


class WaysLM(PredictorLM):
    """A model as it is, ``plain``, and under ways to suppress without words, all from one pass."""

    def __init__(self, lm: OpenedModel, ways: Mapping[str, Way]) -> None:
        super().__init__(lm.model, lm.tokenizer, lm.logit_map)
        self.opened, self.ways = lm, {"plain": Way(), **ways}
        self.predictors: Any = tuple(self.ways)

    def _log_probabilities(self, z: Tensor) -> Iterator[tuple[Any, Tensor]]:
        embedding: Any = output_embedding(self.model)
        for name, way in self.ways.items():
            with torch.autocast(z.device.type, enabled=False), using(self.opened, way):
                logits = self.logit_map(embedding(z.to(embedding.weight.dtype)).float())
            yield name, logits.log_softmax(-1)


def _score_end(log_p: Tensor, continuation: list[int]) -> Score:
    """Score a continuation of n tokens by the last n rows of log-probabilities [≥ n, V]."""
    log_p = log_p[-len(continuation) :]
    targets = torch.tensor(continuation, device=log_p.device)
    total = log_p.gather(1, targets[:, None]).double().sum()
    return Score(total.item(), bool((log_p.argmax(-1) == targets).all()))


def open_predictors(path: Path | str, *, device: str = "cpu", batch_size: int = 8) -> PredictorLM:
    """Open a model directory, with or without a head."""
    if has_sidecar(path):
        model, tokenizer, sidecar = load_checkpoint(path, device=device)
        return PredictorLM(model, tokenizer, sidecar.logit_map, sidecar.head, batch_size=batch_size)
    model, tokenizer = read_checkpoint(path, device=device)
    logit_map = LogitMap.of(model)
    verify_logit_map(model, logit_map)
    return PredictorLM(model, tokenizer, logit_map, batch_size=batch_size)


def with_feedback(controller: Controller | None = None) -> AbstractContextManager[Any]:
    """Attach saved uncertainty feedback to every model that lm-eval loads during the block.

    A ``controller`` changes the states of each, whose directory must have its head.
    """
    create = HuggingFaceLM._create_model

    def create_with_feedback(lm: Any, pretrained: str, **settings: Any) -> None:
        create(lm, pretrained=pretrained, **settings)
        if has_uncertainty(pretrained):
            load_uncertainty(pretrained, lm._model)
        if controller is not None:
            model, sidecar = lm._model, load_sidecar(pretrained, lm._model)
            parts = model, lm.tokenizer, sidecar.head.to(model.device), sidecar.logit_map
            install(OpenedModel(Path(pretrained), *parts, lens=None), [controller])

    return patch.object(HuggingFaceLM, "_create_model", create_with_feedback)


def run_harness(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line over prismlm's decoders and uncertainty feedback.

    ``--controller FILE`` among the arguments is ours.
    """
    from lm_eval.__main__ import cli_evaluate

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--controller")
    ours, others = parser.parse_known_args(arguments)
    controller = None if ours.controller is None else Controller.load(ours.controller)
    with patch.object(sys, "argv", ["lm-eval", *others]), with_feedback(controller):
        cli_evaluate()
