"""Backbones by name, at sizes that train on a laptop, as Hugging Face configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prismlm.errors import InputError, suggest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "llama-laptop": {
        "model_type": "llama",
        "hidden_size": 160,
        "intermediate_size": 432,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}


def build_config(settings: dict[str, Any], vocab_size: int, eos_token_id: int) -> PretrainedConfig:
    """Return the configuration for ``{"preset": NAME, …}`` or ``{"model_type": …, …}``.

    Keys beside the preset override it; any key of the family's configuration is allowed.

    Raises:
        InputError: an unknown preset, family or key.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = dict(settings)
    preset = values.pop("preset", None)
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(
                f"there is no model preset {preset!r}.{suggest(preset, list(PRESETS))} "
                f"Known: {', '.join(PRESETS)}."
            )
        values = PRESETS[preset] | values
    family = values.pop("model_type", None)
    if family is None or family not in CONFIG_MAPPING:
        hint = suggest(str(family), list(CONFIG_MAPPING))
        raise InputError(
            f"model needs a preset ({', '.join(PRESETS)}) or a Hugging Face model_type; "
            f"got {family!r}.{hint}"
        )
    known = CONFIG_MAPPING[family]()
    unknown = [key for key in values if not hasattr(known, key)]
    if unknown:
        names = sorted(known.to_dict())
        raise InputError(f"{family} has no setting {unknown[0]!r}.{suggest(unknown[0], names)}")
    return AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
        **values,
    )


def build_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a freshly initialised causal language model for ``config``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)
