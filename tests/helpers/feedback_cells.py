"""What a cell of the matrix of uncertainty feedback asserts, for columns of one process.

Every function takes a family's name and a directory, and returns a note to show, or None.
"""

from collections import Counter

import pytest
import torch

from prismlm.models.seam import decoder_and_embeddings
from prismlm.models.uncertainty_feedback import load_uncertainty
from prismlm.training import parallel
from tests.helpers.feedback_calls import LEVELS, NEVER, PROMPT, Fed, code_of, gradients, same
from tests.helpers.feedback_families import build

NEW = 5
NEUTRAL = LEVELS // 2


def made(fed, ids, **settings):
    """Return what is generated, with its logits."""
    torch.manual_seed(3)
    kept = {"return_dict_in_generate": True, "output_logits": True}
    return fed.generate(ids, max_new_tokens=NEW, **kept, **settings)


def assert_replayed(fed, ids, found):
    """Compare generated logits with those step by step, and with those of one call with its codes.

    Other codes give other logits, so that there is something to compare.
    """
    whole = found.sequences[:, :-1]
    logits, codes = fed.steps(whole, ids.shape[1])
    same(torch.stack(found.logits, 1), logits)
    at_once = fed.call(whole, codes=codes)
    assert torch.equal(at_once.uncertainty_codes, codes)
    same(at_once.logits[:, ids.shape[1] - 1 :], logits)
    other = torch.where(codes < 0, codes, (codes + 7) % LEVELS)
    assert (fed.call(whole, codes=other).logits - at_once.logits).abs().max() > 1e-3
    return logits


@torch.no_grad()
def greedy(name, _directory):
    fed = Fed(name)
    ids = fed.rows()
    found = made(fed, ids, do_sample=False)
    logits = assert_replayed(fed, ids, found)
    logits[..., NEVER] = -torch.inf
    assert torch.equal(logits.argmax(-1), found.sequences[:, ids.shape[1] :])


@torch.no_grad()
def sampling(name, _directory):
    fed = Fed(name)
    ids = fed.rows()
    found = made(fed, ids, do_sample=True, temperature=1.5)
    assert_replayed(fed, ids, found)


@torch.no_grad()
def beams(name, _directory):
    """A beam's score is that of its tokens alone, each with the code of that beam's prediction."""
    fed = Fed(name)
    ids = fed.rows()
    settings = {"do_sample": False, "num_beams": 3, "num_return_sequences": 3}
    found = made(fed, ids, **settings, output_scores=True)
    first = ids.shape[1]
    for beam, (sequence, score) in enumerate(
        zip(found.sequences, found.sequences_scores, strict=True)
    ):
        logits, _ = fed.steps(sequence[None, :-1], first, rows=[beam // 3])
        summed = logits[0].log_softmax(-1).gather(1, sequence[first:, None]).sum() / NEW
        same(summed, score)


@torch.no_grad()
def padding(name, _directory):
    fed = Fed(name)
    long = fed.rows(1, PROMPT + 2, seed=1)
    short = fed.rows(1, PROMPT, seed=2)
    sizes = [short.shape[1], long.shape[1]]
    width = sizes[1]
    nothing = torch.zeros(1, width - sizes[0], dtype=torch.int64)
    for sides in ((nothing, short), (short, nothing)):
        left = sides[0] is nothing
        ids = torch.cat([torch.cat(sides, 1), long])
        mask = torch.ones_like(ids)
        real = slice(width - sizes[0], None) if left else slice(None, sizes[0])
        mask[0] = 0
        mask[0, real] = 1
        for passes in (1, 2):
            fed.feedback.passes = passes
            output = fed.call(ids, mask=mask)
            for row, one, at in ((0, short, real), (1, long, slice(None))):
                alone = fed.call(one, rows=[row])
                codes = torch.full((width,), -1)
                codes[at] = alone.uncertainty_codes[0]
                assert torch.equal(output.uncertainty_codes[row], codes)
                same(output.logits[row, at], alone.logits[0])
            if not left:
                continue
            settings = {"max_new_tokens": NEW, "do_sample": False}
            both = fed.generate(ids, mask=mask, **settings)
            for row, one in enumerate((short, long)):
                alone = fed.generate(one, rows=[row], **settings)
                assert torch.equal(both[row, width:], alone[0, one.shape[1] :])


@torch.no_grad()
def continued(name, _directory):
    fed = Fed(name)
    ids = fed.rows(3, PROMPT + 2)
    first = ids.shape[1] - 2
    logits, codes = fed.steps(ids, first)
    _rows_change(fed, ids, codes, logits)
    if name == "mamba":
        return "by single tokens"
    pieces = fed.call(ids[:, :first], use_cache=True)
    second = fed.call(ids[:, first:], cache=pieces[fed.cache])
    held = code_of(pieces.logits[:, -1])
    assert torch.equal(second.uncertainty_codes, torch.stack([held, NEUTRAL + 0 * held], 1))
    replayed = torch.cat([pieces.uncertainty_codes, second.uncertainty_codes], 1)
    same(fed.call(ids, codes=replayed).logits[:, first:], second.logits)
    settings = {"do_sample": False, "return_dict_in_generate": True}
    straight = fed.generate(ids, max_new_tokens=6, **settings)
    some = fed.generate(ids, max_new_tokens=3, **settings)
    cache = {"past_key_values": some.past_key_values}
    rest = fed.generate(some.sequences, first=False, max_new_tokens=3, **cache, **settings)
    assert torch.equal(rest.sequences, straight.sequences)
    return None


def _rows_change(fed, ids, codes, logits):
    """Rows of a cache are chosen, in another order and number, and go on with their own codes."""
    last = ids.shape[1] - 1
    output = fed.call(ids[:, : last - 1], use_cache=True)
    output = fed.call(ids[:, last - 1 : last], cache=output[fed.cache])
    cache, order = output[fed.cache], [2, 0, 0]
    cache.reorder_cache(torch.tensor(order))
    output = fed.call(ids[order, last:], rows=order, cache=cache)
    assert torch.equal(output.uncertainty_codes[:, 0], codes[order, last])
    same(output.logits[:, 0], logits[order, -1])
    if not hasattr(cache, "batch_select_indices") or fed.name in ("mamba", *RECURRENT):
        return
    following = code_of(output.logits[:, -1])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    more = fed.call(torch.tensor([[4], [4]]), rows=[0, 0], cache=cache)
    assert more.uncertainty_codes[:, 0].tolist() == [following[1]] * 2
    whole = torch.cat([ids[0], torch.tensor([4])])[None]
    replayed = torch.cat([codes[:1], following[None, 1:2]], 1)
    same(more.logits[:, 0], fed.call(whole, codes=replayed).logits[:, -1].expand(2, -1))


# Their caches choose rows by reorder_cache alone.
RECURRENT = ("protot", "deltanet")


def checkpointing(name, _directory):
    """Recomputed activations give the same gradients, after two passes, and are recomputed."""
    found, calls = [], []
    for recompute in (False, True):
        fed = Fed(name, passes=2)
        fed.model.train()
        if recompute:
            parallel.recompute_activations(fed.model)
        runs = Counter()
        for part in parallel.blocks(decoder_and_embeddings(fed.model)[0])[-1].modules():
            if not any(part.children()):
                part.register_forward_hook(lambda part, *_, runs=runs: runs.update([part]))
        ids = fed.rows(2, PROMPT + 2)
        fed.call(ids, labels=ids).loss.backward()
        found.append(gradients(fed.model))
        calls.append(max(runs.values()))
    assert calls == [2, 3]
    assert found[0].keys() == found[1].keys()
    assert found[0]["prismlm_uncertainty.weight"].abs().max() > 0
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, msg=key)


@torch.no_grad()
def save_load(name, directory):
    fed = Fed(name, rows=9, passes=2)
    fed.model.save_pretrained(directory)
    again = Fed.__new__(Fed)
    again.__dict__ |= fed.__dict__
    again.model = again.run = type(build(name)).from_pretrained(directory).eval()
    again.feedback = load_uncertainty(directory, again.model)
    assert again.model is not fed.model
    assert again.feedback.embedding.weight.data_ptr() != fed.feedback.embedding.weight.data_ptr()
    assert (again.feedback.passes, again.feedback.embedding.levels) == (2, LEVELS)
    ids = fed.rows()
    expected, found = (one.call(ids) for one in (fed, again))
    assert torch.equal(found.uncertainty_codes, expected.uncertainty_codes)
    assert torch.equal(found.logits, expected.logits)
    settings = {"max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(again.generate(ids, **settings), fed.generate(ids, **settings))
    fed.feedback.detach()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(fed.call(ids).logits, expected.logits)


CELLS = {
    "greedy": greedy,
    "sampling": sampling,
    "beams": beams,
    "padding": padding,
    "continued": continued,
    "checkpointing": checkpointing,
    "save/load": save_load,
}
