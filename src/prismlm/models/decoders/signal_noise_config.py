"""The settings of a decoder of signal/noise attention, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, no_type_check

from prismlm.errors import InputError, check_choice, check_number
from prismlm.models.decoders.own_decoder import OwnConfig
from prismlm.ops.signal_noise_attention import SCALINGS

MLPS = ("gelu", "sparse_coding", "experts")
FORMS = ("overcomplete", "complete")
# Whole numbers from 1 on, and what to give.
COUNTS = {
    "vocab_size": "the number of tokens in the tokenizer",
    "hidden_size": "the width d of the stream, a multiple of head_size",
    "intermediate_size": "the width of the MLP, or leave it out for 4 d",
    "num_hidden_layers": "the number of blocks, 8 in the source",
    "head_size": "an even divisor p of hidden_size",
    "expansion": "R, 2 in the source: a layer has R·d/p heads",
}
# Those of one kind of MLP alone.
COUNTS_OF = {
    "experts": {
        "num_local_experts": "the number of experts E",
        "num_experts_per_tok": "k, how many experts a token goes to",
    },
    "sparse_coding": {"sparse_coding_steps": "how many steps S, or leave it out for the source's"},
}
FLAGS = {
    "tied_output": "true for the output matrix Uᵀ, false for one of its own",
    "scale_by_width": "true to divide scores by √d, false for √p",
    "bias": "whether norms and MLPs have one",
    "use_cache": "whether a forward pass returns a cache",
    "tie_word_embeddings": "whether input and output embeddings are one matrix",
    "output_router_logits": "whether outputs hold them",
}
Test = Callable[[float], bool]


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _not_negative(value: float) -> bool:
    return 0 <= value < math.inf


# A test of each number, and what it expects.
NUMBERS: dict[str, tuple[Test, str]] = {
    "frequency_base": (_positive, "a positive, finite number; 10000 in the source"),
    "frequency_ratio": (_positive, "a positive, finite number ρ; π in the source, 1 for none"),
    "noise_weight": (
        lambda value: 0 <= value <= 1,
        "λ, a number from 0, which leaves the noise heads out, to 1",
    ),
    "dropout": (lambda value: 0 <= value < 1, "a share of at least 0 and below 1; 0 for none"),
    "layer_norm_eps": (_positive, "a small positive number; 1e-5 unless set"),
    "initializer_range": (_positive, "a small positive standard deviation; 0.02 unless set"),
}
NUMBERS_OF: dict[str, dict[str, tuple[Test, str]]] = {
    "experts": {
        "router_aux_loss_coef": (_not_negative, "0, for no such loss, or a positive, finite number")
    },
    "sparse_coding": {
        "sparse_coding_step_size": (_positive, "a positive, finite η; 0.1 unless set"),
        "sparse_coding_threshold": (_not_negative, "0 or a positive, finite θ; 0.1 unless set"),
    },
}


# Its __init__ takes keywords that its signature does not name, which jaxtyping would refuse.
@no_type_check
class SignalNoiseConfig(OwnConfig):
    """Configuration of :class:`~prismlm.models.decoders.signal_noise.SignalNoiseForCausalLM`.

    Source: Prism, §2 and §3; the stack is nanoGPT's, the source's base. Beside :class:`OwnConfig`:

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
    """

    model_type = "prismlm_signal_noise"
    state_settings: ClassVar[tuple[str, ...]] = ("head_size", "expansion")
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "router_logits",
        "aux_loss",
    ]

    vocab_size: int = 50304
    hidden_size: int = 512
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

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.sparse_coding_steps is None:
            self.sparse_coding_steps = 1 if self.sparse_coding_form == "complete" else 2
        if self.output_router_logits is None:
            self.output_router_logits = self.mlp == "experts"
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check what no model can be built from, or none that can be trained.

        Sizes that do not go together are reported by
        :func:`~prismlm.layers.signal_noise_attention.signal_heads`.

        Raises:
            InputError: a size below 1 or no whole number, a number out of its range, a flag that is
                neither true nor false, a choice that there is not, more experts for a token than
                there are, or routers asked for without.
        """
        check_choice("mlp", self.mlp, MLPS)
        check_choice("frequency_scaling", self.frequency_scaling, SCALINGS)
        check_choice("sparse_coding_form", self.sparse_coding_form, FORMS)
        for name, what in FLAGS.items():
            flag: object = getattr(self, name)
            if not isinstance(flag, bool):
                raise InputError(f"{name} is {flag!r}: expected true or false, {what}.")
        for name, what in (COUNTS | COUNTS_OF.get(self.mlp, {})).items():
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{name} is {value!r}: expected a whole number of at least 1. Give {what}."
                )
        for name, (allowed, what) in (NUMBERS | NUMBERS_OF.get(self.mlp, {})).items():
            check_number(name, getattr(self, name), what, allowed)
        if self.mlp == "experts" and self.num_experts_per_tok > self.num_local_experts:
            raise InputError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, of num_local_experts "
                f"{self.num_local_experts}: expected at most as many. Lower the one or raise the "
                "other."
            )
        check_router_asked_for(self, self.output_router_logits)


def check_noise_weight_set(value: object) -> None:
    """Raise InputError for a λ that is no number from 0 to 1, nor a tensor of one."""
    check_number("λ", value, "one number from 0 to 1", lambda share: 0 <= share <= 1)


def check_router_asked_for(config: SignalNoiseConfig, asked: bool | None) -> None:
    """Raise InputError if router logits are asked for and there is no router."""
    if asked and config.mlp != "experts":
        raise InputError(
            f"output_router_logits is on, and mlp={config.mlp!r} has no router: leave it out, or "
            "build the model with mlp='experts'."
        )
