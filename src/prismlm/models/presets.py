"""Named Hugging Face configurations, from laptop sizes to GPT-2 XL.

The vocabulary is always that of the corpus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prismlm.errors import InputError, suggest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def _gpt2(width: int, heads: int, layers: int) -> dict[str, Any]:
    """Return GPT-2 without dropout, for training over one epoch."""
    sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": 1024}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"model_type": "gpt2", "tie_word_embeddings": True} | sizes | dropout


def _sizes(model_type: str, width: int, layers: int, **settings: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "tie_word_embeddings": True}
    return {"model_type": model_type} | sizes | settings


def _llama(width: int, inner: int, heads: int, layers: int, positions: int) -> dict[str, Any]:
    counts = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
    inner_sizes = {"intermediate_size": inner, "max_position_embeddings": positions}
    return _sizes("llama", width, layers, **inner_sizes, **counts)


def _signal_noise(width: int, size: int, layers: int, **settings: Any) -> dict[str, Any]:
    return _sizes("prismlm_signal_noise", width, layers, head_size=size, **settings)


PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _llama(96, 256, heads=3, layers=2, positions=512),
    "llama-laptop": _llama(160, 432, heads=5, layers=3, positions=1024),
    "llama-small": _llama(320, 864, heads=5, layers=7, positions=1024),
    "gpt2-laptop": _gpt2(160, heads=5, layers=3),
    # The sizes of PRISM (Guide Labs, 2025): GPT-2's own four.
    "gpt2-small": _gpt2(768, heads=12, layers=12),
    "gpt2-medium": _gpt2(1024, heads=16, layers=24),
    "gpt2-large": _gpt2(1280, heads=20, layers=36),
    "gpt2-xl": _gpt2(1600, heads=25, layers=48),
    # Mamba 2: without CUDA kernels, Hugging Face's Mamba is quadratic in the length of a row.
    "mamba-laptop": _sizes(
        "mamba2", 160, 5, state_size=64, head_dim=32, num_heads=10, n_groups=1, chunk_size=64
    ),
    # Without dropout, for training over one epoch.
    "protot-tiny": _sizes("prismlm_protot", 96, layers=2, num_channels=16, dropout=0.0),
    "protot-laptop": _sizes("prismlm_protot", 160, layers=3, dropout=0.0),
    # 8 signal and 8 noise heads per layer; R = 4 has as many parameters as GPT-2's layers.
    "signal-noise-tiny": _signal_noise(96, 24, layers=2),
    "signal-noise-laptop": _signal_noise(160, 20, layers=3),
    "signal-noise-laptop-wide": _signal_noise(160, 20, layers=3, expansion=4),
    # The 50 M model of Prism (Huang), with GPT-2's vocabulary: 51 M with a separate output
    # matrix, 47 M with the tied one of its equations.
    "signal-noise": _signal_noise(512, 64, layers=8),
    "signal-noise-untied": _signal_noise(512, 64, layers=8, tied_output=False),
    "gpt2-50m": _gpt2(512, heads=8, layers=8),
    "gpt2-22m": _gpt2(288, heads=9, layers=8),
    # ProtoT and its baselines, with the default settings of the source.
    "protot": _sizes("prismlm_protot", 256, layers=6, dropout=0.1),
    "llama": _llama(256, 688, heads=4, layers=6, positions=2048) | {"attention_dropout": 0.1},
    "deltanet": _sizes("prismlm_deltanet", 256, layers=6),
    "mamba": _sizes("mamba", 256, layers=6),
}


def build_config(settings: dict[str, Any], vocab_size: int, eos_token_id: int) -> PretrainedConfig:
    """Return the configuration for ``{"preset": NAME, …}`` or ``{"model_type": …, …}``.

    Other keys override the preset; any key of the family's configuration is allowed. Raises
    InputError for an unknown preset, family or key.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = dict(settings)
    preset = values.pop("preset", None)
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(
                f"'model.preset' is {preset!r}, which is not a preset."
                f"{suggest(preset, list(PRESETS))} Known: {', '.join(PRESETS)}."
            )
        values = PRESETS[preset] | values
    family = values.pop("model_type", None)
    if family is None or family not in CONFIG_MAPPING:
        hint = suggest(str(family), list(CONFIG_MAPPING))
        raise InputError(
            f"'model.model_type' is {family!r}: a model needs a preset ({', '.join(PRESETS)}) or "
            f"a Hugging Face model_type.{hint}"
        )
    known = CONFIG_MAPPING[family]()
    unknown = [key for key in values if not hasattr(known, key)]
    if unknown:
        names = sorted(known.to_dict())
        raise InputError(
            f"there is no setting 'model.{unknown[0]}' of {family}.{suggest(unknown[0], names)}"
        )
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_token_id)
    try:
        return AutoConfig.for_model(family, vocab_size=vocab_size, **tokens, **values)
    except StrictDataclassError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from error
        message = " ".join(str(error).split())
        raise InputError(f"a {family} model cannot be built: {message}") from error


def build_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a freshly initialised causal language model for ``config``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)
