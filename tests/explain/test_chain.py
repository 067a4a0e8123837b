"""Token → channel → prototype, against the model itself run without what is credited."""

import pickle
from dataclasses import replace

import pytest
import torch

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.explain import chain as chain_module
from prismlm.explain.chain import chains, mixer_decoder_of, read_direct_path
from prismlm.explain.prediction import PrototypeUse
from prismlm.interventions.channels import MaskRead, intervene
from prismlm.layers import PrototypeHead
from prismlm.models.decoders.protot import half_lives
from prismlm.ops.prototype_mixer import naive
from prismlm.pages.trace import Pool, trace_data
from tests.helpers.mixer_models import (
    CHANNELS,
    LAYERS,
    WIDTH,
    make_llama,
    make_model,
    save_with_head,
    tokens,
)

TEXT = "The patient was given a dose of the drug"
SWITCHES = {
    "default": {},
    "no mass, no convolution": {"mass_normalisation": False, "convolution_layers": []},
    "convolutions, gates": {"convolution_layers": [0, 1, 2], "shared_gate_layers": [0, 1, 2]},
    "decays by token": {"decay_mode": "token", "num_groups": 3, "alpha": 0.7},
}


def make_head():
    head = PrototypeHead(WIDTH, 40, 4, scale=2.5)
    head.reset_parameters(torch.Generator().manual_seed(1))
    return head


def split(head, path, position):
    """Return prototypes in use, their numbers, and the parts of their activations."""
    routing = head.nearest(path.states[position : position + 1].float())
    figures = zip(*(column[0].tolist() for column in routing[:3]), strict=True)
    own = [PrototypeUse(i, a, cosine, 2 * a, 0.0) for i, cosine, a in figures]
    return own, routing.indices[0], path.parts(position, routing.indices[0])


def check_sums(some, tolerance=1e-5):
    for chain in some:
        total = chain.embedding + sum(chain.mlps) + sum(chain.mixers) + chain.edit
        assert total == pytest.approx(chain.activation, abs=tolerance)


@pytest.fixture(scope="module")
def lm(tiny_corpus, tmp_path_factory):
    tokenizer = Corpus.open(tiny_corpus).tokenizer
    model = make_model(len(tokenizer))
    return prismlm.load(save_with_head(model, tokenizer, tmp_path_factory.mktemp("protot")))


@pytest.mark.parametrize("name", SWITCHES)
def test_parts_sum_to_the_activation(name):
    head = make_head()
    path = read_direct_path(make_model(**SWITCHES[name]), head, tokens(21))
    for position in (0, 1, 5, 20):
        own, _, parts = split(head, path, position)
        activations = torch.tensor([use.activation for use in own])
        torch.testing.assert_close(parts.total.float(), activations)
        assert (parts.edit == 0).all()
        assert parts.channels.shape == (4, LAYERS, CHANNELS)
        of_uses = chains(path, position, own, ["word"] * 21)
        check_sums(of_uses)
        assert {len(chain.channels) for chain in of_uses} == {3 if position else 0}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_channels_part_is_what_its_layer_gives_less_without_it(name, layer):
    model, head, ids = make_model(**SWITCHES[name]), make_head(), tokens(15)
    path = read_direct_path(model, head, ids)
    _, numbers, parts = split(head, path, 14)
    hidden = model(ids[None], output_hidden_states=True).hidden_states[layer]
    block = model.model.layers[layer]
    whole = block.mixer(block.mixer_norm(hidden)).output[0, 14]
    # What h is multiplied by, from the definition.
    unit = torch.nn.functional.normalize(head.prototypes[numbers], dim=-1)
    z, h = path.states[14], path.hidden[14]
    gain = model.model.norm.weight / (h.square().mean() + model.config.rms_norm_eps).sqrt()
    for channel in range(CHANNELS):
        with intervene(model, MaskRead(layer, channel)):
            less = block.mixer(block.mixer_norm(hidden)).output[0, 14]
        expected = head.scale * (unit @ (gain * (whole - less))) / z.norm()
        torch.testing.assert_close(
            parts.channels[:, layer, channel].float(), expected, rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_tokens_part_is_what_its_value_gives_through_convolution_and_channel(layer):
    model, head, ids = make_model(), make_head(), tokens(13)
    path = read_direct_path(model, head, ids)
    position, channel = 12, 4
    _, numbers, _ = split(head, path, position)
    found = path.token_parts(position, numbers, layer, torch.full_like(numbers, channel))
    assert found.shape == (4, position)
    flow, mixer = path.flows[layer], model.model.layers[layer].mixer
    read = torch.zeros_like(flow.read)
    read[:, channel] = flow.read[:, channel]
    along = (path._directions(position, numbers)[1] @ path.outputs[layer].double()).float()
    for source in range(position):
        # The layer as it is, with the value of one token alone.
        alone = torch.zeros_like(flow.inputs)
        alone[source] = flow.inputs[source]
        values = mixer.convolution(alone[None])[0] if mixer.convolves else alone[None]
        out, _ = naive.prefix_mean(flow.write[None], read[None], values, mixer.decay)
        torch.testing.assert_close(
            found[:, source].float(), along @ out[0, position], rtol=1e-3, atol=1e-6
        )


def test_the_chain_names_the_largest_channels_and_tokens(monkeypatch):
    monkeypatch.setattr(chain_module, "CHANNELS_NAMED", 5)
    monkeypatch.setattr(chain_module, "TOKENS_NAMED", 19)
    model, head = make_model(), make_head()
    path = read_direct_path(model, head, tokens(20))
    own, _, parts = split(head, path, 19)
    (chain, *_) = chains(path, 19, own, [f"word {i}" for i in range(20)])
    every = parts.channels[0].flatten()
    assert [abs(use.activation_part) for use in chain.channels] == pytest.approx(
        every.abs().sort(descending=True).values[:5].tolist()
    )
    for use in chain.channels:
        assert use.activation_part == every[use.layer * CHANNELS + use.channel]
        assert use.share == pytest.approx(use.activation_part / chain.activation)
        assert use.contribution == pytest.approx(2 * use.activation_part)
        assert use.half_life == pytest.approx(float(half_lives(model)[use.layer][use.channel]))
        assert sum(s.part for s in use.tokens) == pytest.approx(use.activation_part, abs=1e-6)
        sizes = [abs(s.part) for s in use.tokens]
        assert sizes == sorted(sizes, reverse=True)
        assert sorted(s.position for s in use.tokens) == list(range(19))
        assert all(s.token == f"word {s.position}" for s in use.tokens)


def test_steps_have_the_chains_of_their_leading_prototypes(lm):
    trace = lm.explain(TEXT, generate=3)
    shown = trace_data(trace, Pool(lm.lens))["steps"][4]["chains"]
    own = [one.activation for one in trace[4].chains]
    assert [one["activation"] for one in shown] == pytest.approx(own, rel=1e-5)
    for step in trace:
        leading = [(use.id, use.activation) for use in step.prototypes[:3]]
        assert [(one.prototype, one.activation) for one in step.chains] == leading
        check_sums(step.chains)


def test_an_edit_is_a_part_of_its_own_after_its_block_too(lm):
    before = lm.explain(TEXT)[6]
    with lm.edit(prismlm.Ablate(prototype=before.prototypes[0].id)):
        trace = lm.explain(TEXT)
    check_sums(chain for step in trace for chain in step.chains)
    assert trace[6].chains[0].edit != 0
    assert before.chains[0].edit == 0


def test_fitted_weights_and_other_decoders_have_no_chains(lm):
    """Such weights are no sum over channels: each depends on the others of its position."""
    head = pickle.loads(pickle.dumps(lm.head))
    head.weights = "fitted"
    step = replace(lm, head=head, lens=None).explain(TEXT)[6]
    assert step.chains is None
    assert step.prototypes
    assert mixer_decoder_of(make_llama()) is None
    with pytest.raises(InputError, match="not a decoder of prototype mixers"):
        read_direct_path(make_llama(), make_head(), tokens(4))


def test_a_bfloat16_model_within_its_rounding(lm):
    model = pickle.loads(pickle.dumps(lm.model)).to(torch.bfloat16)
    step = replace(lm, model=model, lens=None).explain(TEXT)[6]
    check_sums(step.chains, 2e-2 * float(lm.head.scale))
    for chain in step.chains:
        with pytest.raises(AssertionError):
            check_sums([chain], 1e-7)
