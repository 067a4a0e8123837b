"""Uncertainty feedback on every family: generation, padding, caches, gradients and files."""

import inspect

import pytest
import torch

from prismlm.training import parallel
from tests.helpers.small_models import (
    BUILT,
    FAMILIES,
    IMAGE,
    LEVELS,
    OWN,
    V,
    attach_drawn,
    build,
    codes_of,
)

PROMPT, NEW = 4, 5
# Padding, which generation would ignore, and image tokens.
NEVER = [0, IMAGE]

every_family = pytest.mark.parametrize("name", [*FAMILIES, *BUILT, *OWN])
# The others have the caches and blocks of one of these.
KINDS = ("gpt2", "llama", "mamba", "t5", "llava", "protot", "signal-noise")
every_kind = pytest.mark.parametrize("name", KINDS)


class Fed:
    """A tiny model with feedback, and one way to call it with ids of its decoder."""

    def __init__(self, name, **settings):
        self.name, self.model = name, build(name)
        self.feedback = attach_drawn(self.model, LEVELS, **settings)
        self.cache = "cache_params" if name == "mamba" else "past_key_values"
        self.prefix = "decoder_" if name == "t5" else ""
        self.parameters = inspect.signature(self.model.forward).parameters

    def rows(self, count=2, length=PROMPT, seed=0):
        """Return ids [count, length], longer by an image where the family takes images."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, IMAGE, (count, length), generator=generator)
        ids[:, 0] = 0 if self.name == "t5" else 1
        if self.name != "llava":
            return ids
        return torch.cat([ids[:, :2], ids.new_full((count, 4), IMAGE), ids[:, 2:]], 1)

    def inputs(self, ids, rows, mask, *, first):
        """Return the arguments for these rows of a batch, with sources or images."""
        rows = list(range(len(ids))) if rows is None else rows
        generator, given = torch.Generator().manual_seed(7), {f"{self.prefix}input_ids": ids}
        if self.name == "t5":
            given["input_ids"] = torch.randint(2, V, (4, 5), generator=generator)[rows]
        if self.name == "llava" and first:
            given["pixel_values"] = torch.randn(4, 3, 8, 8, generator=generator)[rows]
        return given if mask is None else given | {f"{self.prefix}attention_mask": mask}

    def call(self, ids, *, rows=None, cache=None, codes=None, mask=None, **settings):
        """Return the output for ids [B, T] that follow those of a cache, if there is one."""
        given = self.inputs(ids, rows, mask, first=cache is None)
        given |= {"use_cache": cache is not None} | settings
        given |= {} if cache is None else {self.cache: cache}
        given |= {} if codes is None else {"uncertainty_codes": codes}
        if mask is not None and "position_ids" in self.parameters:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        return self.model(**given)

    def generate(self, ids, *, rows=None, mask=None, **settings):
        torch.manual_seed(3)
        given = self.inputs(ids, rows, mask, first=True) | {"max_new_tokens": NEW} | settings
        return self.model.generate(
            **given, suppress_tokens=NEVER, pad_token_id=0, eos_token_id=None
        )

    def steps(self, ids, first, *, rows=None):
        """Return logits from position first − 1 on, and all codes, of one token at a time."""
        output = self.call(ids[:, :first], rows=rows, use_cache=True)
        logits, codes = [output.logits[:, -1:]], [output.uncertainty_codes]
        for at in range(first, ids.shape[1]):
            expected = codes_of(logits[-1])
            output = self.call(ids[:, at : at + 1], rows=rows, cache=output[self.cache])
            assert torch.equal(output.uncertainty_codes, expected)
            logits.append(output.logits)
            codes.append(output.uncertainty_codes)
        return torch.cat(logits, 1), torch.cat(codes, 1)


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@every_family
@torch.no_grad()
def test_generated_logits_are_those_step_by_step_and_of_one_call_with_all_codes(name):
    fed = Fed(name)
    ids = fed.rows()
    how = {"do_sample": True, "temperature": 1.5, "return_dict_in_generate": True}
    found = fed.generate(ids, **how, output_logits=True)
    whole = found.sequences[:, :-1]
    logits, codes = fed.steps(whole, ids.shape[1])
    same(torch.stack(found.logits, 1), logits)
    at_once = fed.call(whole, codes=codes)
    assert torch.equal(at_once.uncertainty_codes, codes)
    same(at_once.logits[:, ids.shape[1] - 1 :], logits)
    other = torch.where(codes < 0, codes, (codes + 7) % LEVELS)
    assert (fed.call(whole, codes=other).logits - at_once.logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba"])
@torch.no_grad()
def test_more_passes_make_more_positions_exact(name):
    fed = Fed(name)
    ids = fed.rows(1, 6)
    logits, codes = fed.steps(ids, 1)
    for fed.feedback.passes in (1, 2, 6):
        output = fed.call(ids)
        # Position 0 has no code; each further pass makes one more exact.
        exact = slice(fed.feedback.passes)
        assert torch.equal(output.uncertainty_codes[:, exact], codes[:, exact])
    same(output.logits, logits)


@every_kind
@torch.no_grad()
def test_the_score_of_a_beam_is_that_of_its_tokens_alone(name):
    fed = Fed(name)
    ids = fed.rows()
    settings = {"do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    found = fed.generate(ids, **settings, return_dict_in_generate=True, output_scores=True)
    for beam, (sequence, score) in enumerate(
        zip(found.sequences, found.sequences_scores, strict=True)
    ):
        logits, _ = fed.steps(sequence[None, :-1], ids.shape[1], rows=[beam // 3])
        chosen = logits[0].log_softmax(-1).gather(1, sequence[ids.shape[1] :, None])
        same(chosen.sum() / NEW, score)


@every_kind
@torch.no_grad()
def test_padded_rows_are_those_rows_alone(name):
    fed = Fed(name)
    short, long = fed.rows(1, PROMPT, seed=2), fed.rows(1, PROMPT + 2, seed=1)
    width, missing = long.shape[1], long.shape[1] - short.shape[1]
    nothing = torch.zeros(1, missing, dtype=torch.int64)
    for left in (True, False):
        ids = torch.cat([torch.cat([nothing, short] if left else [short, nothing], 1), long])
        real = slice(missing, None) if left else slice(None, width - missing)
        mask = torch.ones_like(ids)
        mask[0] = 0
        mask[0, real] = 1
        for fed.feedback.passes in (1, 2):
            output = fed.call(ids, mask=mask)
            for row, one, at in ((0, short, real), (1, long, slice(None))):
                alone = fed.call(one, rows=[row])
                codes = torch.full((width,), -1)
                codes[at] = alone.uncertainty_codes[0]
                assert torch.equal(output.uncertainty_codes[row], codes)
                same(output.logits[row, at], alone.logits[0])
                if left:
                    both = fed.generate(ids, mask=mask, do_sample=False)
                    alone = fed.generate(one, rows=[row], do_sample=False)
                    assert torch.equal(both[row, width:], alone[0, one.shape[1] :])


@pytest.mark.parametrize("name", [name for name in KINDS if name != "mamba"])
@torch.no_grad()
def test_a_prompt_in_two_pieces(name):
    fed = Fed(name)
    ids = fed.rows(3, PROMPT + 2)
    pieces = fed.call(ids[:, :-2], use_cache=True)
    second = fed.call(ids[:, -2:], cache=pieces[fed.cache])
    carried = codes_of(pieces.logits[:, -1])
    neutral = torch.full_like(carried, LEVELS // 2)
    assert torch.equal(second.uncertainty_codes, torch.stack([carried, neutral], 1))
    replayed = torch.cat([pieces.uncertainty_codes, second.uncertainty_codes], 1)
    same(fed.call(ids, codes=replayed).logits[:, -2:], second.logits)


@every_kind
def test_recomputed_activations_give_the_same_gradients(name):
    found = []
    for recompute in (False, True):
        fed = Fed(name, passes=2)
        fed.model.train()
        if recompute:
            parallel.recompute_activations(fed.model)
        ids = fed.rows(2, PROMPT + 2)
        fed.call(ids, labels=ids).loss.backward()
        named = fed.model.named_parameters()
        found.append({key: p.grad for key, p in named if p.grad is not None})
    assert found[0]["prismlm_uncertainty.weight"].abs().max() > 0
    torch.testing.assert_close(found[1], found[0])
