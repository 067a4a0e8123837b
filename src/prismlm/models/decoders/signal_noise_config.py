"""The settings of a decoder of signal/noise attention, and what they may be."""

# No postponed annotations: huggingface_hub checks settings by the types themselves.
import math
from typing import Any, ClassVar, Literal, no_type_check

from huggingface_hub.dataclasses import strict

from prismlm.errors import InputError
from prismlm.models.decoders.own_decoder import OwnConfig, count, number, positive, share


# Its __init__ takes keywords that its signature does not name, which jaxtyping would refuse.
@no_type_check
@strict
class SignalNoiseConfig(OwnConfig):
    """Configuration of :class:`~prismlm.models.decoders.signal_noise.SignalNoiseForCausalLM`.

    Source: Prism, §2 and §3; the stack is nanoGPT's, the source's base. Beside :class:`OwnConfig`,
    whose ``intermediate_size`` is that of the MLP or of each expert, or the atoms of an
    overcomplete dictionary, 4 d unless it is given:

    Attributes:
        head_size: p.
        expansion: R; a layer has R·d/p heads, half of them signal heads.
        tied_output: whether the output matrix of attention is Uᵀ.
        frequency_base: of the rotations.
        frequency_ratio: ρ.
        frequency_scaling: ``base``, or ``angle`` as the source's Fig. 1 prints it.
        scale_by_width: divide scores by √d, as Eq. 6 prints it, in place of √p.
        noise_weight: λ of a model that is not trained yet; a checkpoint holds its own.
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
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "router_logits",
        "aux_loss",
    ]

    vocab_size: int = count(default=50304)
    hidden_size: int = count(default=512)
    num_hidden_layers: int = count(default=8)
    head_size: int = count(default=64)
    expansion: int = count(default=2)
    tied_output: bool = True
    frequency_base: float | int = positive(default=10_000.0)
    frequency_ratio: float | int = positive(default=math.pi)
    frequency_scaling: Literal["base", "angle"] = "base"
    scale_by_width: bool = False
    noise_weight: float | int = number("from 0 to 1", lambda value: 0 <= value <= 1)(default=0.01)
    dropout: float | int = share(default=0.0)
    bias: bool = False
    mlp: Literal["gelu", "sparse_coding", "experts"] = "gelu"
    sparse_coding_form: Literal["overcomplete", "complete"] = "overcomplete"
    sparse_coding_steps: int | None = None
    sparse_coding_step_size: float | int = positive(default=0.1)
    sparse_coding_threshold: float | int = 0.1
    num_local_experts: int = count(default=8)
    num_experts_per_tok: int = count(default=2)
    output_router_logits: bool | None = None
    router_aux_loss_coef: float | int = number(
        "0 or a positive, finite number", lambda value: 0 <= value < math.inf
    )(default=0.01)
    layer_norm_eps: float | int = positive(default=1e-5)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.sparse_coding_steps is None:
            self.sparse_coding_steps = 1 if self.sparse_coding_form == "complete" else 2
        if self.output_router_logits is None:
            self.output_router_logits = self.mlp == "experts"
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse more experts for a token than there are, and routers asked for without."""
        if self.mlp == "experts" and self.num_experts_per_tok > self.num_local_experts:
            raise InputError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, of num_local_experts "
                f"{self.num_local_experts}: expected at most as many."
            )
        self.check_router(self.output_router_logits)

    def check_router(self, asked: bool | None) -> None:
        """Raise InputError if router logits are asked for and there is no router."""
        if asked and self.mlp != "experts":
            raise InputError(
                f"output_router_logits is on, and mlp={self.mlp!r} has no router: leave it out, or "
                "build the model with mlp='experts'."
            )
