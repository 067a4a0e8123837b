"""What the settings of a decoder of signal/noise attention may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import cast

from torch import Tensor

from prismlm.errors import InputError, suggest
from prismlm.models.decoders.signal_noise_config import SignalNoiseConfig
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


def check_config(config: SignalNoiseConfig) -> None:
    """Check what no model can be built from, or none that can be trained.

    Sizes that do not go together are reported by
    :func:`~prismlm.layers.signal_noise_attention.signal_heads`.

    Raises:
        InputError: a size below 1 or no whole number, a number out of its range, a flag that is
            neither true nor false, a choice that there is not, more experts for a token than
            there are, or routers asked for without.
    """
    _known("mlp", config.mlp, MLPS)
    _known("frequency_scaling", config.frequency_scaling, SCALINGS)
    _known("sparse_coding_form", config.sparse_coding_form, FORMS)
    for name, what in FLAGS.items():
        flag: object = getattr(config, name)
        if not isinstance(flag, bool):
            raise InputError(f"{name} is {flag!r}: expected true or false, {what}.")
    for name, what in (COUNTS | COUNTS_OF.get(config.mlp, {})).items():
        value: object = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"{name} is {value!r}: expected a whole number of at least 1. Give {what}."
            )
    for name, (allowed, what) in (NUMBERS | NUMBERS_OF.get(config.mlp, {})).items():
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not allowed(cast(float, value)):
            raise InputError(f"{name} is {value!r}: expected {what}.")
    if config.mlp == "experts" and config.num_experts_per_tok > config.num_local_experts:
        raise InputError(
            f"num_experts_per_tok is {config.num_experts_per_tok}, of num_local_experts "
            f"{config.num_local_experts}: expected at most as many. Lower the one or raise the "
            "other."
        )
    check_router_asked_for(config, config.output_router_logits)


def check_noise_weight_set(value: object) -> None:
    """Raise InputError for a λ that is no number from 0 to 1, nor a tensor of one."""
    number: object = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) <= 1:
        raise InputError(f"λ is {value!r}: expected one number from 0 to 1.")


def check_router_asked_for(config: SignalNoiseConfig, asked: bool | None) -> None:
    """Raise InputError if router logits are asked for and there is no router."""
    if asked and config.mlp != "experts":
        raise InputError(
            f"output_router_logits is on, and mlp={config.mlp!r} has no router: leave it out, or "
            "build the model with mlp='experts'."
        )


def _known(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(
            f"{name} is {value!r}: expected {', '.join(map(repr, choices[:-1]))} or "
            f"{choices[-1]!r}.{suggest(str(value), list(choices))}"
        )
