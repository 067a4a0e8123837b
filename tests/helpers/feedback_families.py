"""Tiny random models of the families that uncertainty feedback is tested with."""

import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from prismlm.models.decoders.own_decoder import DeltaNetConfig
from prismlm.models.decoders.protot import ProtoTConfig
from prismlm.models.decoders.signal_noise import SignalNoiseConfig
from prismlm.models.uncertainty_feedback import attach_uncertainty
from prismlm.ops.uncertainty_feedback import naive, quantise

V = 23
IMAGE = 22
LEVELS = 64
COMMON = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SIZES = COMMON | TOKENS | HEADS | {"intermediate_size": 24}
OWN_SIZES = COMMON | {"pad_token_id": 0, "dropout": 0.0}
FAMILIES = {
    "gpt2": lambda: GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4, eos_token_id=None,
        pad_token_id=0, bos_token_id=1, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    ),
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=64),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=2),
    "mamba": lambda: MambaConfig(**COMMON | TOKENS, state_size=4),
}  # fmt: skip
# Of which one test has an own word to say.
ODD = {
    "rwkv": lambda: RwkvConfig(**COMMON, attention_hidden_size=16, intermediate_size=24),
    "recurrent-gemma": lambda: RecurrentGemmaConfig(
        **COMMON | TOKENS, intermediate_size=48, num_attention_heads=2, lru_width=16,
        attention_window_size=32,
    ),
}  # fmt: skip
OWN = {
    "protot": lambda: ProtoTConfig(**OWN_SIZES, num_channels=4),
    "deltanet": lambda: DeltaNetConfig(**OWN_SIZES, num_heads=2),
    "signal-noise": lambda: SignalNoiseConfig(**OWN_SIZES, head_size=4),
}


def t5(layers):
    config = T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=layers, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, initializer_factor=1.0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def llava(layers):
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**SIZES | {"num_hidden_layers": layers}),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


BUILT = {"t5": t5, "llava": llava}


def build(name, layers=2):
    """Return the same random model of a family at every call, in evaluation mode."""
    torch.manual_seed(0)
    if name in BUILT:
        return BUILT[name](layers).eval()
    config = (FAMILIES | OWN | ODD)[name]()
    config.num_hidden_layers = layers
    # Of others it is derived from the number of layers.
    if vars(config).get("layer_types"):
        config.layer_types = config.layer_types[:layers]
    return AutoModelForCausalLM.from_config(config).eval()


def codes_of(logits):
    """Return the codes of predictions, from the naive form of their entropy."""
    return quantise(naive.normalised_entropy(logits).float(), LEVELS)


def attach_drawn(model, levels=65536, **settings):
    """Attach feedback as the source has it: a drawn row a code, and one pass, unless said."""
    drawn = {"rows": None, "deviation": None, "passes": 1}
    return attach_uncertainty(model, levels, **drawn | settings)
