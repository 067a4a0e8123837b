"""What is looked at a second time is what was read the first time, with the codes that were fed."""

import pytest
import torch
from tokenizers import pre_tokenizers
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM

from prismlm import Ablate
from prismlm.explain.language_model import PrismLM
from prismlm.interventions.plan import applied, plan_for
from prismlm.interventions.steering import steer
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.models.uncertainty_feedback import recording_codes
from prismlm.models.watch import Hook, watch
from tests.helpers.small_models import FAMILIES, OWN, attach_drawn, make_tokenizer

TEXT, NEW = "w3 w5 w7 w11 w13 w17", 8
SAME = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(scope="module", params=["protot", "gpt2"])
def lm(request, tmp_path_factory):
    tokenizer = make_tokenizer(eos_token="w0")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = (FAMILIES | OWN)[request.param]()
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    # A table that changes predictions, and codes of which no two are alike.
    attach_drawn(model, 65536, rows=64, deviation=2.0, passes=2)
    head = PrototypeHead(16, 24, 4, scale=1.3)
    head.reset_parameters(torch.Generator().manual_seed(1))
    return PrismLM(
        path=tmp_path_factory.mktemp("fed"), model=model, tokenizer=tokenizer, head=head.eval(),
        logit_map=LogitMap.of(model), lens=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(lm):
    """The run that is looked at again: its tokens, codes, and last states and logits."""
    run = ids, codes, *_ = written_by(lm)
    with torch.no_grad():
        anew = lm.model(ids[:, :-1], use_cache=False).uncertainty_codes
    # Reading anew would feed others.
    assert (anew - torch.cat(codes, 1)).abs().max() > 100
    return run


def written_by(lm):
    """Generate; return tokens, codes, and the state and logits before each generated token."""
    states, logits = [], []

    def seen(_, args, kwargs, output):
        states.append(args[0][:, -1])
        logits.append(output[:, -1])

    hook = Hook(output_embedding(lm.model), after=seen)
    with recording_codes(lm.model) as codes, watch([hook]):
        ids = lm.write(lm.encode(TEXT, NEW), NEW, 0.0, 0)
    return ids, codes, torch.stack(states, 1)[0], torch.stack(logits, 1)[0]


def test_generate(lm, first):
    ids, codes, states, logits = first
    trace = lm.explain(TEXT, generate=NEW)
    own = logits.gather(1, ids[0, -NEW:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([s.model_logit for s in trace])[-NEW:], own, **SAME)
    assert [step.uncertainty_code for step in trace][1:] == torch.cat(codes, 1)[0].tolist()[1:]
    torch.testing.assert_close(trace.predictions.states[-NEW:], normalize(states), **SAME)
    if trace.path is not None:
        torch.testing.assert_close(trace.path.states[-NEW:], states, **SAME)
        # Their sums are compared with the activations of the run.
        assert all(step.chains for step in trace)
    assert (trace.path is None) == (lm.model.config.model_type == "gpt2")


def test_steer(lm):
    edit = Ablate(prototype=lm.explain(TEXT)[-1].prototypes[0].id)
    steering = steer(lm, TEXT, [edit], generate=NEW)
    with applied(lm.model, plan_for(lm, [edit], None)):
        ids, *_, logits = written_by(lm)
    assert [token.token_id for token in steering.tokens] == ids[0, -NEW:].tolist()
    own = logits.softmax(-1).gather(1, ids[0, -NEW:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([t.after for t in steering.tokens]), own, **SAME)
