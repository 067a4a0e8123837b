"""A masked-diffusion decoder made from a left-to-right one (DiffuLLaMA, Gong et al. 2024).

    t ~ U(0, 1);  each token is masked with probability t, independently
    loss = E_t [ (1 / t) Σ_{i masked} −log p(x_i | partly masked text) ] / tokens

The causal mask is opened during training. The shift of left-to-right models is kept: the state at
position i − 1, which now sees both sides, predicts the masked token i, and an end of text stands
before the first. Text is written by filling in masks over several steps, the surest first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from prismlm.models.seam import capture

# A text with hardly a mask would weigh without bound.
LEAST_MASKED = 1e-3


class MaskedDiffusionLM(LlamaForCausalLM):
    """Llama in which every token sees every other; its last token id is the mask.

    Attributes:
        open_share: of what stands to its right, the share that a token sees; drawn anew in each
            pass, and 1 but in training.
    """

    open_share: float = 1.0

    @property
    def mask_id(self) -> int:
        """The id of the mask."""
        return int(self.config.vocab_size) - 1

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, *given: Any, **named: Any
    ) -> Any:
        """Run with attention to both sides, padding left out; else as Llama.

        Args:
            input_ids: int64 [B, T].
            attention_mask: 1 on tokens, 0 on padding, [B, T]; all ones if left out.
            given, named: passed on.
        """
        rows, length = input_ids.shape
        attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # A mask of four dimensions is taken as it is, in the place of the causal one.
        both_sides = attended.bool()[:, None, None, :].expand(rows, 1, length, length)
        if self.open_share < 1:
            before = torch.ones(length, length).tril().bool()
            both_sides = both_sides & (before | (torch.rand(length, length) < self.open_share))
        return super().forward(input_ids, both_sides, *given, **named)


def from_left_to_right(model: PreTrainedModel) -> MaskedDiffusionLM:
    """Return a Llama's weights as a masked-diffusion decoder, with a mask beside its tokens.

    The mask begins as the mean of all tokens' embeddings.
    """
    values = model.config.to_dict()
    values["vocab_size"] += 1
    changed = MaskedDiffusionLM(LlamaConfig(**values))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name].mean(0, keepdim=True)])
    changed.load_state_dict(weights)
    return changed


def masked_states(
    model: MaskedDiffusionLM, ids: Tensor, masked: Tensor, attended: Tensor | None = None
) -> Tensor:
    """Return the states that predict masked tokens, in the order of the text: [N, d].

    Args:
        model: run once; with gradients where they are on.
        ids: the whole text, int64 [B, T].
        masked: bool [B, T].
        attended: False on padding, bool [B, T].
    """
    read = after_an_end(model, ids.masked_fill(masked, model.mask_id))
    if attended is not None:
        attended = functional.pad(attended, (1, 0), value=1)
    with capture(model, logits=False) as seen:
        model(input_ids=read, attention_mask=attended, use_cache=False)
    return seen.z[:, :-1][masked]


def after_an_end(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return texts, int64 [B, T], with an end of text before them, [B, T + 1]."""
    return functional.pad(ids, (1, 0), value=int(model.config.eos_token_id))


def diffusion_loss(
    model: MaskedDiffusionLM,
    ids: Tensor,
    maskable: Tensor,
    attended: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Return the loss of a batch, in nats a token: an upper bound of −log p(text).

    The t of its rows are spread evenly over 0 to 1, from one draw: batches differ less so.

    Args:
        model: in training mode.
        ids: int64 [B, T].
        maskable: tokens that count, bool [B, T].
        attended: False on padding, bool [B, T].
        generator: of t and masks.
    """
    rows = len(ids)
    share = (torch.arange(rows) + torch.rand(1, generator=generator)) / rows
    share = share[torch.randperm(rows, generator=generator), None].clamp_min(LEAST_MASKED)
    masked = (torch.rand(ids.shape, generator=generator) < share) & maskable
    z = masked_states(model, ids, masked, attended)
    logits = model.lm_head(z)
    missed = functional.cross_entropy(logits, ids[masked], reduction="none")
    weight = (1 / share).expand_as(ids)[masked]
    return (missed * weight).sum() / maskable.sum()


@torch.no_grad()
def fill_in(model: MaskedDiffusionLM, ids: Tensor, steps: int) -> Tensor:
    """Return a text, int64 [T], with its masks filled in over ``steps`` steps.

    Each step reads the text once and writes the top tokens of the masks that it is surest of, as
    many as leave equally many to each later step.
    """
    text = ids.clone()
    for left in range(steps, 0, -1):
        holes = (text == model.mask_id).nonzero()[:, 0]
        if not len(holes):
            break
        # With an end before it, position i of what is read is the token before token i.
        read = after_an_end(model, text[None])
        logits = model(input_ids=read, use_cache=False).logits[0, holes]
        # The mask itself is never written.
        sure, token = logits[:, : model.mask_id].softmax(-1).max(-1)
        now = sure.argsort(descending=True, stable=True)[: -(-len(holes) // left)]
        text[holes[now]] = token[now]
    return text
