"""Small random models with attention heads, and batches of windows made by hand."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from prismlm.corpus.windows import WindowBatch
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM

VOCABULARY = 37


def make_signal_noise(vocabulary=VOCABULARY, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_size": 4}
    settings = sizes | {"noise_weight": 0.1, "initializer_range": 0.3} | settings
    config = SignalNoiseConfig(vocab_size=vocabulary, eos_token_id=0, **settings)
    return SignalNoiseForCausalLM(config).eval().requires_grad_(False)


def make_gpt2(vocabulary=VOCABULARY, positions=64):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": positions}
    config = GPT2Config(vocab_size=vocabulary, eos_token_id=0, bos_token_id=0, **sizes)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


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
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]
