"""The settings of a decoder of signal/noise attention."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, no_type_check

from transformers import PreTrainedConfig


# Its __init__ takes keywords that its signature does not name, which jaxtyping would refuse.
@no_type_check
class SignalNoiseConfig(PreTrainedConfig):
    """Configuration of :class:`~prismlm.models.decoders.signal_noise.SignalNoiseForCausalLM`.

    Source: Prism, §2 and §3; the stack is nanoGPT's, the source's base.

    Attributes:
        vocab_size: V.
        hidden_size: d.
        intermediate_size: of the MLP, of each expert, or atoms of an overcomplete dictionary; None
            for 4 d.
        num_hidden_layers: blocks.
        head_size: p.
        expansion: R; a layer has R·d/p heads, half of them signal heads.
        tied_output: whether the output matrix of attention is Uᵀ.
        frequency_base: of the rotations.
        frequency_ratio: ρ.
        frequency_scaling: ``base``, or ``angle`` as the source's Fig. 1 prints it.
        scale_by_width: divide scores by √d, as Eq. 6 prints it, in place of √p.
        noise_weight: λ of a model that is not trained yet; a checkpoint holds its own.
        dropout: after the token embeddings and on what a block adds to the stream.
        bias: of norms and of MLPs, those of experts too.
        mlp: ``gelu``, ``sparse_coding`` or ``experts``; see :mod:`prismlm.layers`.
        sparse_coding_form: ``overcomplete``, which adds to the stream, or ``complete``, which
            replaces it.
        sparse_coding_steps: S; None for 2 overcomplete and 1 complete, as in the sources.
        sparse_coding_step_size: η of those steps.
        sparse_coding_threshold: θ, the weight of the sum of a code.
        num_local_experts: E.
        num_experts_per_tok: k.
        output_router_logits: whether outputs hold ``router_logits`` and ``aux_loss`` and the loss
            counts it; None for yes with experts, which without it may fall out of use.
        router_aux_loss_coef: what ``aux_loss`` counts in the loss.
        layer_norm_eps: added to the variance.
        initializer_range: standard deviation of embeddings and projections at the start.
        use_cache: whether a forward pass returns a cache unless told otherwise.
    """

    model_type = "prismlm_signal_noise"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "router_logits",
        "aux_loss",
    ]

    vocab_size: int = 50304
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    head_size: int = 64
    expansion: int = 2
    tied_output: bool = True
    frequency_base: float = 10_000.0
    frequency_ratio: float = math.pi
    frequency_scaling: Literal["base", "angle"] = "base"
    scale_by_width: bool = False
    noise_weight: float = 0.01
    dropout: float = 0.0
    bias: bool = False
    mlp: Literal["gelu", "sparse_coding", "experts"] = "gelu"
    sparse_coding_form: Literal["overcomplete", "complete"] = "overcomplete"
    sparse_coding_steps: int | None = None
    sparse_coding_step_size: float = 0.1
    sparse_coding_threshold: float = 0.1
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool | None = None
    router_aux_loss_coef: float = 0.01
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.sparse_coding_steps is None:
            self.sparse_coding_steps = 1 if self.sparse_coding_form == "complete" else 2
        if self.output_router_logits is None:
            self.output_router_logits = self.mlp == "experts"
        super().__post_init__(**kwargs)
