"""One way to call models of every family: ids of the decoder, and what else a call needs."""

import inspect

import torch

from prismlm.ops.uncertainty_feedback import naive, quantise
from tests.helpers.feedback_families import IMAGE, V, attach_drawn, build

LEVELS = 64
PROMPT = 4
# The image of a prompt, between its first two tokens and the others.
PLACES = 4
# Padding, which generation would not look at, and places of images.
NEVER = [0, IMAGE]


class Fed:
    """A tiny model with feedback, and rows for it.

    Attributes:
        run: what is called: the model, or what it was wrapped or compiled to.
        cache: the name of its cache in calls and outputs.
    """

    def __init__(self, name, layers=2, **settings):
        self.name = name
        self.model = build(name, layers)
        self.feedback = attach_drawn(self.model, LEVELS, **settings)
        self.run = self.model
        self.cache = "cache_params" if name == "mamba" else "past_key_values"
        self.ids_name = "decoder_input_ids" if name == "t5" else "input_ids"
        self.mask_name = "decoder_attention_mask" if name == "t5" else "attention_mask"
        self.parameters = inspect.signature(self.model.forward).parameters

    def rows(self, count=2, length=PROMPT, seed=0):
        """Return ids [count, length], longer by an image where the family takes images."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, IMAGE, (count, length), generator=generator)
        ids[:, 0] = 0 if self.name == "t5" else 1
        if self.name != "llava":
            return ids
        return torch.cat([ids[:, :2], ids.new_full((count, PLACES), IMAGE), ids[:, 2:]], 1)

    def beside(self, rows, *, first=True):
        """Return what a call of these rows of a batch needs beside its ids."""
        generator = torch.Generator().manual_seed(7)
        if self.name == "t5":
            return {"input_ids": torch.randint(2, V, (4, 5), generator=generator)[rows]}
        if self.name == "llava" and first:
            return {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)[rows]}
        return {}

    def call(self, ids, *, rows=None, cache=None, codes=None, mask=None, **settings):
        """Return the model's output for ids [B, T] that follow those of a cache, if there is one.

        ``rows`` says which rows of the batch these are, for sources and images.
        """
        rows = list(range(len(ids))) if rows is None else rows
        given = self.beside(rows, first=cache is None) | {self.ids_name: ids} | settings
        if cache is not None:
            given[self.cache] = cache
        if codes is not None:
            given["uncertainty_codes"] = codes
        if mask is not None:
            given[self.mask_name] = mask
            if "position_ids" in self.parameters:
                given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        given.setdefault("use_cache", cache is not None)
        return self.run(**given)

    def generate(self, ids, *, rows=None, first=True, mask=None, **settings):
        """Return what the model generates after ids [B, T]: neither padding nor places of images.

        ``first`` is false for ids most of which a cache among the settings has seen.
        """
        rows = list(range(len(ids))) if rows is None else rows
        given = self.beside(rows, first=first) | {self.ids_name: ids} | settings
        if mask is not None:
            given[self.mask_name] = mask
        given["suppress_tokens"] = NEVER
        return self.model.generate(**given, pad_token_id=0, eos_token_id=None)

    def steps(self, ids, first, *, rows=None):
        """Return logits from position first − 1 on, and all codes, of one token at a time.

        The first tokens are one call; each one after them has the code of the prediction before
        it, which is looked at here.
        """
        output = self.call(ids[:, :first], rows=rows, use_cache=True)
        logits, codes = [output.logits[:, -1:]], [output.uncertainty_codes]
        for at in range(first, ids.shape[1]):
            expected = code_of(logits[-1])
            output = self.call(ids[:, at : at + 1], rows=rows, cache=output[self.cache])
            assert torch.equal(output.uncertainty_codes, expected)
            logits.append(output.logits)
            codes.append(output.uncertainty_codes)
        return torch.cat(logits, 1), torch.cat(codes, 1)


def code_of(logits):
    """Return the codes of predictions, from the plain form of their entropy."""
    return quantise(naive.normalised_entropy(logits).float(), LEVELS)


def gradients(model):
    """Return every gradient there is, the table's among them."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
