"""Small random models with uncertainty feedback, and texts of random tokens."""

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from prismlm.models.decoders.protot import ProtoTConfig
from prismlm.probes.uncertainty_feedback import InspectOptions
from prismlm.probes.uncertainty_feedback.signal import CheckInputs, own_codes
from tests.helpers.feedback_families import attach_drawn

VOCABULARY, WIDTH, LEVELS = 37, 16, 64


def make_fed_gpt2(vocabulary=VOCABULARY, *, positions=64, layers=2, tied=True, **settings):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=WIDTH, n_layer=layers, n_head=2, n_positions=positions,
        initializer_range=0.4, eos_token_id=0, bos_token_id=0, tie_word_embeddings=tied,
        embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval().requires_grad_(False)
    return model, attach_drawn(model, **{"levels": LEVELS} | settings)


def make_fed_protot(vocabulary=VOCABULARY):
    torch.manual_seed(0)
    config = ProtoTConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, num_hidden_layers=2, num_channels=4,
        initializer_range=0.4, eos_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
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
