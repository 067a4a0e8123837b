"""The model that is trained, a Hugging Face decoder with a prototype head: losses, prototypes.

The losses R1, R2, RES and DIV are those of :meth:`PrototypeHead.losses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from prismlm.corpus.windows import IGNORED, PackedDataset
from prismlm.layers import PrototypeHead
from prismlm.models.seam import Captured, LogitMap, capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.models.watch import evaluating
from prismlm.ops.prototype_head import Routing
from prismlm.ops.tiles import at_once
from prismlm.training.recipe import LossWeights

# Logits whose divergence is computed at a time on a CPU.
TILE_ELEMENTS = 2**16
ROWS_PER_PASS = 8
# States of one document resemble each other, so that only a few of a row are used.
STATES_PER_ROW = 16
# More states per prototype hardly improve k-means.
STATES_PER_CLUSTER = 8
KMEANS_ITERATIONS = 10
# Cosines that k-means computes at a time.
KMEANS_TILE = 2**21


class OutputMap(NamedTuple):
    """The map from states to logits: ℓ = logit_map(W z + b)."""

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, " V"] | None
    logit_map: LogitMap

    @classmethod
    def from_model(cls, model: nn.Module, *, detach: bool = True) -> OutputMap:
        """Return the output map of a model; with ``detach`` it passes no gradient to W and b."""
        embedding: Any = output_embedding(model)
        weight, bias = embedding.weight, getattr(embedding, "bias", None)
        if detach:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return cls(weight, bias, LogitMap.of(model))

    def __call__(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N V"]:
        """Return the logits that the softmax takes, in the dtype of W."""
        return self.logit_map(F.linear(z.to(self.weight.dtype), self.weight, self.bias))

    def restricted_to(self, tokens: Int64[Tensor, " S"]) -> OutputMap:
        """Return the map to the logits of these tokens."""
        bias = None if self.bias is None else self.bias[tokens]
        return OutputMap(self.weight.index_select(0, tokens), bias, self.logit_map)


class VocabularySample:
    """A sample of the vocabulary, from which a training step estimates KL(p ‖ q).

    It has the |F| = ``frequent`` most frequent tokens, and |D| = ``drawn`` others that are redrawn
    in each step, with replacement. In p and q the latter are weighted by (V − |F|) / |D|, so that
    the normalising sums are unbiased. If |D| covers all others, the KL is exact.
    """

    def __init__(self, counts: Int64[Tensor, " V"], frequent: int, drawn: int) -> None:
        order = counts.argsort(descending=True, stable=True)
        self.frequent, self.rare = order[:frequent], order[frequent:]
        self.drawn = min(drawn, len(self.rare))

    def to(self, device: torch.device) -> VocabularySample:
        """Move the token ids to a device, on which tokens are then drawn; return self."""
        self.frequent, self.rare = self.frequent.to(device), self.rare.to(device)
        return self

    def draw(self, seed: int) -> tuple[Int64[Tensor, " S"], Float[Tensor, " S"]]:
        """Return the tokens of a step and the logarithms of their weights."""
        rare, device = self.rare, self.rare.device
        if self.drawn < len(rare):
            generator = torch.Generator(device).manual_seed(seed)
            indices = torch.randint(len(rare), (self.drawn,), generator=generator, device=device)
            rare = rare[indices]
        log_weights = torch.zeros(len(self.frequent) + len(rare), device=device)
        if self.drawn:
            log_weights[len(self.frequent) :] = math.log(len(self.rare) / self.drawn)
        return torch.cat([self.frequent, rare]), log_weights


def sample_positions(length: int, fraction: float, step: int, device: torch.device) -> Tensor:
    """Return every s-th position of a row, s = round(1 / fraction), starting one later per step."""
    stride = max(1, min(length, round(1 / fraction)))
    return torch.arange(step % stride, length, stride, device=device)


def prototype_only_losses(
    z: Float[Tensor, "N d"],
    reconstruction: Float[Tensor, "N d"],
    labels: Int64[Tensor, " N"] | None,
    mask: Bool[Tensor, " N"] | None,
    output_map: OutputMap,
    weights: LossWeights,
    sample: tuple[Int64[Tensor, " S"], Float[Tensor, " S"]] | None = None,
) -> dict[str, Tensor]:
    """Return the losses of the prediction from ẑ alone that have a weight, in nats per token.

        prototype_only_ce = −mean log q(next token),   q = softmax(logit_map(W ẑ + b))
        prototype_only_kl = mean Σ_v p_v log(p_v / q_v),   p = softmax of the model's own logits

    Means are over the positions with a label or, without labels, over all that are not padding.
    p is a target: no gradient reaches the model through it.

    ``labels`` are the next token at each position, −100 to ignore it; ``mask`` is false on padding.
    """
    included = mask if labels is None else labels != IGNORED
    losses: dict[str, Tensor] = {}
    if weights.prototype_only_ce and labels is not None:
        logits = output_map(reconstruction).float()
        ce = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        losses["prototype_only_ce"] = _mean(ce, included)
    if weights.prototype_only_kl:
        log_weights = None
        if sample is not None:
            tokens, log_weights = sample
            output_map = output_map.restricted_to(tokens)
        kl = divergence(output_map(z), output_map(reconstruction), log_weights)
        losses["prototype_only_kl"] = _mean(kl, included)
    return losses


def _mean(values: Tensor, included: Tensor | None) -> Tensor:
    if included is None:
        return values.mean()
    return (values * included).sum() / included.sum().clamp_min(1)


def divergence(
    target: Float[Tensor, "N V"],
    logits: Float[Tensor, "N V"],
    log_weights: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, " N"]:
    """Return KL(p ‖ q) per row, p = softmax(target), q = softmax(logits), in nats.

        KL = Σ_v p_v (target_v − logits_v) − lse(target) + lse(logits)        ∂KL/∂logits = q − p

    ``log_weights`` are added to both logits. ``target`` gets no gradient. Computed in float32, or
    in float64 for such logits. Only q − p, in the dtype of the logits, is kept for the backward
    pass; autograd through two log-softmaxes takes twice the time.
    """
    return cast(
        "Tensor",
        _Divergence.apply(target.detach(), logits, log_weights),  # pyright: ignore[reportUnknownMemberType]
    )


class _Divergence(torch.autograd.Function):
    """Computes the gradient in the forward pass, which has p and q in memory."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, logits: Tensor, log_weights: Tensor | None) -> Tensor:
        n, vocabulary = logits.shape
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        kl = torch.empty(n, dtype=dtype, device=logits.device)
        difference = torch.empty_like(logits)
        rows = max(1, at_once(logits, TILE_ELEMENTS) // max(1, vocabulary))
        for start in range(0, n, rows):
            tile = slice(start, start + rows)
            q_logits, p_logits = logits[tile].to(dtype), target[tile].to(dtype)
            if log_weights is not None:
                q_logits, p_logits = q_logits + log_weights, p_logits + log_weights
            q, p = q_logits.softmax(-1), p_logits.softmax(-1)
            # lse = max − log(largest probability), without another exponential.
            log_sums = q_logits.amax(-1) - q.amax(-1).log() - p_logits.amax(-1) + p.amax(-1).log()
            kl[tile] = ((p_logits - q_logits) * p).sum(-1) + log_sums
            difference[tile] = q.sub_(p)
        ctx.save_for_backward(difference)
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        """Return (q − p) times the gradient of each row."""
        (difference,) = ctx.saved_tensors
        return None, difference * grads[0][:, None].to(difference.dtype), None


@dataclass
class PrismOutput(ModelOutput):
    """The output of a forward pass.

    ``losses`` are unweighted scalars by name: ce, prototype_pull, point_pull, residual, diversity,
    prototype_only_ce and prototype_only_kl. The last two, and in training diversity, are computed
    only if they have a weight.
    """

    loss: Tensor | None = None  # CE + loss_scale · Σ weight · part; None without labels
    logits: Tensor | None = None  # of the model, [B, T, V]
    past_key_values: Any = None
    losses: dict[str, Tensor] | None = None
    # Of the N states that the head was run on: all B·T, or in training a sample of the positions;
    # None before the prototypes are initialised.
    routing: Routing | None = None


class PrismForCausalLM(nn.Module):
    """Run a decoder and its prototype head in one forward pass.

        loss = CE + s · Σ_i w_i L_i,   L = R1, R2, RES, DIV, prototype-only CE and KL

    with s = ``loss_scale`` in [0, 1]. The head reads the state z that enters the output embedding
    and changes neither the decoder's forward pass nor its logits. Before the prototypes are
    initialised, the head is left out and the loss is the CE.

    Means, and R1's minimum, are over one forward pass.

    Source: PRISM: Training Data Prototypes for Language Models (Guide Labs, 2025).

    Args:
        model: a Hugging Face causal language model, with any uncertainty feedback attached.
        head: a prototype head as wide as the model's last hidden state.
        weights: of the head's losses.
        detach: keep the head's gradients out of the model, which then trains bit for bit as it
            would without a head.
        residual_reduction: whether RES averages or sums over the d elements.
        position_share: fraction of a row's positions that the head is trained on; they shift from
            step to step. The model trains on all positions.
        initialised: whether the prototypes are initialised; False leaves the head out.
    """

    accepts_loss_kwargs = False
    main_input_name = "input_ids"

    def __init__(
        self,
        model: Any,
        head: PrototypeHead,
        *,
        weights: LossWeights | None = None,
        detach: bool = True,
        residual_reduction: Literal["mean", "sum"] = "mean",
        position_share: float = 1.0,
        initialised: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.prototype_head = head
        self.weights = weights if weights is not None else LossWeights()
        self.detach = detach
        self.residual_reduction: Literal["mean", "sum"] = residual_reduction
        self.position_share = position_share
        self.initialised = initialised
        self.loss_scale = 1.0
        # The training step, which determines the sampled positions and tokens.
        self.step = 0
        # In training, the sample of tokens for the prototype-only KL; None for all.
        self.vocabulary: VocabularySample | None = None
        self.uncertainty = uncertainty_of(model)

    @property
    def config(self) -> Any:
        """The decoder's configuration."""
        return self.model.config

    def table_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the table of uncertainty codes, if there is one."""
        return [] if self.uncertainty is None else list(self.uncertainty.embedding.parameters())

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute the decoder's activations in the backward pass, for Trainer."""
        self.model.gradient_checkpointing_enable(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        token_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> PrismOutput:
        """Run the decoder, then the head on the states that enter the output embedding."""
        # With a cache, the decoder would not derive the mask of packed rows from position_ids.
        kwargs.setdefault("use_cache", False)
        with capture(self.model) as captured:
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                labels=labels,
                **kwargs,
            )
        mask = token_mask if token_mask is not None else attention_mask
        routing, parts = None, {}
        if self.initialised:
            routing, parts = self.run_head(captured, None if mask is None else mask.bool(), labels)
        loss = None if labels is None else self.total(output.loss, parts)
        losses = {} if labels is None else {"ce": output.loss.detach()}
        losses |= {name: part.detach() for name, part in parts.items()}
        return PrismOutput(
            loss=loss,
            logits=output.logits,
            past_key_values=getattr(output, "past_key_values", None),
            losses=losses,
            routing=routing,
        )

    def run_head(
        self, captured: Captured, mask: Tensor | None, labels: Tensor | None
    ) -> tuple[Routing, dict[str, Tensor]]:
        """Run the head on the states of a forward pass; return its routing and its losses.

        The prototype-only losses need logits of their own, so they are left out at weight 0.
        """
        weights, states = self.weights, captured.z
        positions: Any = slice(None)
        sample = None
        if self.training and self.position_share < 1:
            length, share = states.shape[1], self.position_share
            positions = sample_positions(length, share, self.step, states.device)
        if self.training and self.vocabulary is not None and weights.prototype_only_kl:
            sample = self.vocabulary.to(states.device).draw(self.step)

        def flat(tensor: Tensor) -> Tensor:
            return tensor[:, positions].flatten(0, 1)

        z = flat(states.detach() if self.detach else states)
        mask = None if mask is None else flat(mask)
        if labels is not None:
            labels = flat(F.pad(labels[:, 1:], (0, 1), value=IGNORED))
        head = self.prototype_head
        output = head(z, mask=mask)
        head_losses = head.losses(
            z,
            output,
            mask=mask,
            residual_reduction=self.residual_reduction,
            with_diversity=weights.diversity > 0 or not self.training,
        )
        parts = {name: loss for name, loss in head_losses._asdict().items() if loss is not None}
        if weights.prototype_only_ce or weights.prototype_only_kl:
            output_map = OutputMap.from_model(self.model, detach=self.detach)
            parts |= prototype_only_losses(
                z, output.reconstruction, labels, mask, output_map, weights, sample
            )
        return output.routing, parts

    def total(self, ce: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """Add the weighted losses of the head to the cross-entropy."""
        loss = ce
        for name, part in parts.items():
            if weight := getattr(self.weights, name):
                loss = loss + self.loss_scale * weight * part
        return loss


@torch.no_grad()
def spherical_kmeans(
    vectors: Float[Tensor, "N d"], centres: Float[Tensor, "K d"], iterations: int
) -> Float[Tensor, "K d"]:
    """Return the unit centres of spherical k-means, started from ``centres``.

        a_n = argmax_i cos(x_n, m_i)        m_i = Σ_{n: a_n = i} x̂_n / ‖Σ …‖

    An empty cluster moves its centre to the vector with the lowest cosine to its own centre, the
    next one to the vector with the second lowest. N ≥ K; vectors may have any norm.

    Source: Dhillon and Modha, Concept Decompositions, Machine Learning 42, 2001.
    """
    unit, centres = F.normalize(vectors.float(), dim=-1), F.normalize(centres.float(), dim=-1)
    tiles = torch.split(unit, max(16, KMEANS_TILE // len(centres)))
    for _ in range(iterations):
        nearest = [(tile @ centres.T).max(1) for tile in tiles]
        cosines, assignment = (torch.cat(parts) for parts in zip(*nearest, strict=True))
        sums = torch.zeros_like(centres).index_add_(0, assignment, unit)
        empty = (torch.bincount(assignment, minlength=len(centres)) == 0).nonzero().squeeze(1)
        sums[empty] = unit[cosines.argsort(stable=True)[: len(empty)]]
        centres = F.normalize(sums, dim=-1)
    return centres


def cluster_centres(states: Float[Tensor, "N d"], count: int, iterations: int) -> Tensor:
    """Return K cluster centres of randomly ordered states, scaled to the states' mean norm."""
    return spherical_kmeans(states, states[:count], iterations) * states.norm(dim=-1).mean()


def initialise_prototypes(
    model: PrismForCausalLM,
    rows: PackedDataset,
    generator: torch.Generator,
    method: Literal["states", "kmeans", "random"] = "states",
) -> None:
    """Initialise the prototypes, and let the head take part in training from now on.

    With ``states`` each is the hidden state of a random training position, as z / (k τ); with
    ``kmeans`` a cluster centre of such states; with ``random`` prototypes stay random.
    """
    head = model.prototype_head
    per_prototype = STATES_PER_CLUSTER if method == "kmeans" else 1
    if method != "random":
        wanted, per_row = head.num_prototypes * per_prototype, STATES_PER_ROW * per_prototype
        states = sample_states(model.model, rows, wanted, generator, per_row=per_row)
        if method == "kmeans":
            states = cluster_centres(states, head.num_prototypes, KMEANS_ITERATIONS)
        head.place_on(states.to(head.prototypes.device))
    model.initialised = True


@torch.no_grad()
def sample_states(
    model: Any,
    rows: PackedDataset,
    count: int,
    generator: torch.Generator,
    *,
    per_row: int = STATES_PER_ROW,
) -> Float[Tensor, "count d"]:
    """Return the hidden states of ``count`` distinct positions of random training rows, no padding.

    If there are enough rows, ``per_row`` states come from each; if there are fewer positions than
    ``count``, all states are returned.
    """
    per_row = max(per_row, -(-count // max(1, len(rows))))
    order = torch.randperm(len(rows), generator=generator).tolist()
    chosen, spare, missing = [], [], count
    with evaluating(model):
        for first in range(0, len(order), ROWS_PER_PASS):
            if missing <= 0:
                break
            batch = [rows[index] for index in order[first : first + ROWS_PER_PASS]]
            for states in _row_states(model, batch):
                shuffled = states[torch.randperm(len(states), generator=generator)]
                chosen.append(shuffled[:per_row])
                spare.append(shuffled[per_row:])
                missing -= len(chosen[-1])
    return torch.cat(chosen + spare if missing > 0 else chosen)[:count]


def _row_states(model: Any, batch: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the states of each row without padding, float32 on the CPU: [tokens, d] each."""
    device, names = weight_of(model).device, ("input_ids", "position_ids")
    inputs = {name: torch.stack([row[name] for row in batch]).to(device) for name in names}
    with capture(model, logits=False) as captured:
        model(**inputs, use_cache=False)
    z = captured.z.float().cpu()
    return [z[number][row["token_mask"]] for number, row in enumerate(batch)]
