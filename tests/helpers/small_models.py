"""Tiny random models of many families, with uncertainty feedback or without; texts and batches."""

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from prismlm.corpus.windows import WindowBatch
from prismlm.models.decoders.own_decoder import DeltaNetConfig
from prismlm.models.decoders.protot import ProtoTConfig
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from prismlm.models.uncertainty_feedback import attach_uncertainty
from prismlm.ops.uncertainty_feedback import naive, quantise
from prismlm.probes.uncertainty_feedback import InspectOptions
from prismlm.probes.uncertainty_feedback.signal import CheckInputs, own_codes

config_of = AutoConfig.for_model
V = 23
IMAGE = 22
LEVELS = 64
COMMON = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SIZES = COMMON | TOKENS | HEADS | {"intermediate_size": 24}
OWN_SIZES = COMMON | {"pad_token_id": 0, "dropout": 0.0}
FAMILIES = {
    "gpt2": lambda: config_of(
        "gpt2", **TOKENS, vocab_size=V, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    ),
    "llama": lambda: config_of("llama", **SIZES),
    "mistral": lambda: config_of("mistral", **SIZES, sliding_window=None),
    "qwen3": lambda: config_of("qwen3", **SIZES),
    "gemma3": lambda: config_of("gemma3_text", **SIZES, sliding_window=64),
    "mixtral": lambda: config_of("mixtral", **SIZES, num_local_experts=2),
    "mamba": lambda: config_of("mamba", **COMMON | TOKENS, state_size=4),
}  # fmt: skip
# Of which one test has an own word to say.
ODD = {
    "rwkv": lambda: config_of("rwkv", **COMMON, attention_hidden_size=16, intermediate_size=24),
    "recurrent-gemma": lambda: config_of(
        "recurrent_gemma", **COMMON | TOKENS, intermediate_size=48, num_attention_heads=2,
        lru_width=16, attention_window_size=32,
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
        text_config=config_of("llama", **SIZES | {"num_hidden_layers": layers}),
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


VOCABULARY, WIDTH = 37, 16


def make_gpt2(vocabulary=VOCABULARY, positions=64, **settings):
    torch.manual_seed(0)
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": positions} | settings
    config = config_of("gpt2", vocab_size=vocabulary, eos_token_id=0, bos_token_id=0, **sizes)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def make_fed_gpt2(vocabulary=VOCABULARY, *, positions=64, layers=2, tied=True, **settings):
    sizes = {"n_layer": layers, "n_head": 2, "initializer_range": 0.4}
    model = make_gpt2(vocabulary, positions, tie_word_embeddings=tied, **sizes)
    return model, attach_drawn(model, **{"levels": LEVELS} | settings)


def make_fed_protot(vocabulary=VOCABULARY):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_channels": 4}
    sizes |= {"vocab_size": vocabulary, "eos_token_id": 0, "initializer_range": 0.4}
    model = AutoModelForCausalLM.from_config(ProtoTConfig(**sizes)).eval().requires_grad_(False)
    return model, attach_drawn(model, LEVELS)


def random_texts(*lengths, seed=0, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (n,), generator=generator) for n in lengths]


def random_codes(lengths, seed=0):
    """Return random codes of texts of these lengths; their first tokens have none."""
    generator = torch.Generator().manual_seed(seed)
    codes = tuple(torch.randint(0, LEVELS, (length,), generator=generator) for length in lengths)
    for row in codes:
        row[0] = -1
    return codes


def make_tokenizer(**special):
    """One of as many words as the models know tokens."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def inputs_of(model, texts, codes=None, tokenizer=None, **options):
    """Return the inputs of a check, with the model's own codes by default."""
    how = InspectOptions(**options)
    codes = own_codes(model, texts, how.passes) if codes is None else codes
    return CheckInputs(model, tokenizer or make_tokenizer(), texts, codes, how)


def set_table(feedback, table):
    with torch.no_grad():
        feedback.embedding.weight.copy_(table)


def silence_blocks(model):
    """Let blocks add nothing: the next token goes by the last one and its code alone."""
    with torch.no_grad():
        for block in model.transformer.h:
            for last in (block.attn.c_proj, block.mlp.c_proj):
                last.weight.zero_()
                last.bias.zero_()
        model.transformer.wpe.weight.zero_()


def directions(count):
    """Orthonormal vectors that the final norm only lengthens, having mean 0."""
    drawn = torch.randn(16, count, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    basis = torch.linalg.qr(torch.cat([torch.ones(16, 1, dtype=torch.double), drawn], 1)).Q
    return basis[:, 1:].T.float()


def make_signal_noise(vocabulary=VOCABULARY, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_size": 4}
    settings = sizes | {"noise_weight": 0.1, "initializer_range": 0.3} | settings
    config = SignalNoiseConfig(vocab_size=vocabulary, eos_token_id=0, **settings)
    return SignalNoiseForCausalLM(config).eval().requires_grad_(False)


def make_batch(*rows, width=None, before=False, start=0):
    """Return rows of token ids as one batch, padded behind or before."""
    width = width or max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    positions = torch.full((len(rows), width), -1)
    for row, tokens in enumerate(rows):
        at = slice(width - len(tokens), width) if before else slice(0, len(tokens))
        ids[row, at], mask[row, at] = torch.as_tensor(tokens), True
        positions[row, at] = torch.arange(start, start + len(tokens))
        start += len(tokens)
    return WindowBatch(ids, mask, mask.clone(), positions, torch.arange(len(rows)))


def random_rows(*lengths, seed=0, vocabulary=VOCABULARY):
    return [row.tolist() for row in random_texts(*lengths, seed=seed, vocabulary=vocabulary)]
