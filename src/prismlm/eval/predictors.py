"""Three predictors of one model, as a language model of lm-eval.

    plain            softmax of the logits of z, the model's own
    prototype_only   softmax of the logits of ẑ alone
    residual_only    softmax of the logits of r = z − ẑ alone

Each state goes through the whole logit map, so a bias of the output embedding stands in all three:
it belongs to neither part, and each predictor is what the model would say if its state were that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import LogitMap, capture, output_embedding

# A decorator of lm-eval hides its type.
HuggingFaceLM: Any = HFLM
Predictor = Literal["plain", "prototype_only", "residual_only"]
PREDICTORS: tuple[Predictor, ...] = get_args(Predictor)


class Score(NamedTuple):
    """Of a continuation: Σ log p of its tokens, and whether each is the predictor's top."""

    log_likelihood: float
    is_greedy: bool


Scores = dict[Predictor, Score]


class _Row(NamedTuple):
    """Tokens to read once, and the requests that are about their ends."""

    ids: tuple[int, ...]
    requests: list[int]


class PredictorLM(HuggingFaceLM):
    """A model directory as lm-eval's harness asks it, with or without its head.

    One forward pass serves all predictors: z of the positions before each token of a continuation
    is kept, and the logits of z, ẑ and r are formed there alone. Requests that read the same
    tokens share a row. Tokens are those of lm-eval's own ``hf`` model, and sums are in float32 or
    better; there, a model in bfloat16 has its log-probabilities rounded to bfloat16.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        logit_map: what the model does after its output embedding.
        head: its prototype head; None leaves the plain predictor alone.
        predictor: the one that lm-eval's own functions, such as ``simple_evaluate``, see.
        batch_size: rows read at once.
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
        super().__init__(
            pretrained=model,
            tokenizer=cast("Any", tokenizer),
            backend="causal",
            batch_size=batch_size,
        )
        self.head, self.logit_map = head, logit_map
        self.predictor: Predictor = predictor
        self.predictors = PREDICTORS if head is not None else PREDICTORS[:1]
        if predictor not in self.predictors:
            raise InputError(
                f"the predictor is {predictor!r}: expected one of {', '.join(self.predictors)}"
                + (". The others need a prototype head." if head is None else ".")
            )

    def encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return both as tokens; an empty context becomes the token that begins a text."""
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

    def truncated(self, before: list[int], after: list[int]) -> bool:
        """Say whether the beginning of a context is cut because the model reads no more."""
        return len(before) + len(after) > self.max_length + 1

    def rows(self, encoded: Sequence[tuple[list[int], list[int]]]) -> list[_Row]:
        """Return what is read, the longest first."""
        requests: dict[tuple[int, ...], list[int]] = {}
        for number, (before, after) in enumerate(encoded):
            ids = tuple((before + after)[-(self.max_length + 1) : -1])
            requests.setdefault(ids, []).append(number)
        return sorted((_Row(*item) for item in requests.items()), key=lambda row: -len(row.ids))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        """Answer lm-eval, with the one predictor that it was given."""
        encoded = [(before, after) for _, before, after in requests]
        return [tuple(scores[self.predictor]) for scores in self.score(encoded)]

    def score(
        self,
        encoded: Sequence[tuple[list[int], list[int]]],
        advance: Callable[[int], None] | None = None,
    ) -> list[Scores]:
        """Score continuations after their contexts with every predictor.

        Args:
            encoded: tokens of each context and its continuation (:meth:`encoded`).
            advance: called with the number of pairs that each batch has settled.
        """
        found: dict[int, Scores] = {}
        rows, size = self.rows(encoded), int(self.batch_size)
        with evaluating(self.model):
            for first in range(0, len(rows), size):
                before = len(found)
                self._score_batch(rows[first : first + size], encoded, found)
                if advance is not None:
                    advance(len(found) - before)
        return [found[number] for number in range(len(encoded))]

    def _score_batch(
        self,
        rows: list[_Row],
        encoded: Sequence[tuple[list[int], list[int]]],
        found: dict[int, Scores],
    ) -> None:
        """Read a batch, padded on the right of a causal model: no token sees the padding."""
        ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
        with capture(self.model, logits=False) as seen:
            self.model(input_ids=ids.to(self.device), use_cache=False)
        ends = [max(len(encoded[request][1]) for request in row.requests) for row in rows]
        z = torch.cat(
            [
                seen.z[place, len(row.ids) - end : len(row.ids)]
                for place, (row, end) in enumerate(zip(rows, ends, strict=True))
            ]
        )
        for predictor, log_p in self._log_probabilities(z):
            parts = log_p.split(ends)
            for row, part in zip(rows, parts, strict=True):
                for request in row.requests:
                    score = _score_end(part, encoded[request][1])
                    found.setdefault(request, {})[predictor] = score

    def _log_probabilities(self, z: Tensor) -> Iterator[tuple[Predictor, Tensor]]:
        """Yield log softmax of every predictor's logits, [N, V]; one at a time, to bound memory."""
        embedding = output_embedding(self.model)
        states = [z]
        if self.head is not None:
            rebuilt = self.head(z).reconstruction
            states += [rebuilt, z.to(rebuilt.dtype) - rebuilt]
        weight: Any = embedding.weight
        bias: Any = getattr(embedding, "bias", None)
        for predictor, state in zip(self.predictors, states, strict=True):
            logits = self.logit_map(F.linear(state.to(weight.dtype), weight, bias).float())
            yield predictor, logits.log_softmax(-1)


def _score_end(log_p: Tensor, continuation: list[int]) -> Score:
    """Score the last positions, [≥ n, V], with the n tokens that come after them."""
    log_p = log_p[-len(continuation) :]
    targets = torch.tensor(continuation, device=log_p.device)
    chosen = log_p.gather(1, targets[:, None]).double().sum()
    return Score(chosen.item(), bool((log_p.argmax(-1) == targets).all()))
