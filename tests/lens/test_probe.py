"""What the probe of a lens takes for the same model, and what not."""

import copy
from pathlib import Path

import peft
import pytest
import torch

from prismlm.corpus import Corpus
from prismlm.errors import StaleLensError
from prismlm.lens.probe import Probe
from prismlm.models.presets import build_config, build_model
from prismlm.models.uncertainty_feedback import attach_uncertainty
from tests.helpers import families

LENS = Path("lens")


@pytest.mark.parametrize("preset", ["llama-tiny", "protot-tiny", "signal-noise-tiny"])
def test_a_decoder_of_our_own_and_its_copy_in_half_precision(small_corpus, preset):
    corpus = Corpus.open(small_corpus)
    torch.manual_seed(0)
    config = build_config({"preset": preset}, len(corpus.tokenizer), corpus.eos_token_id)
    model = build_model(config).eval()
    probe = Probe.measure(model, corpus, "all", 64)
    assert len(probe.states) == 64
    probe.check(model, LENS)
    probe.check(copy.deepcopy(model).bfloat16(), LENS)
    for parameter in model.parameters():
        parameter.data *= 1.1
    with pytest.raises(StaleLensError, match=r"of another model.*prismlm index"):
        probe.check(model, LENS)


def test_adapters_uncertainty_feedback_and_vocabulary_are_part_of_a_model(small_corpus):
    corpus = Corpus.open(small_corpus)
    model = families.build("llama")
    probe = Probe.measure(model, corpus, "all", 64)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    probe.check(adapted, LENS)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    with pytest.raises(StaleLensError):
        probe.check(adapted, LENS)
    with adapted.disable_adapter():
        probe.check(adapted, LENS)
    plain = families.build("llama")
    feedback = attach_uncertainty(plain, levels=16)
    torch.nn.init.normal_(feedback.embedding.weight)
    with pytest.raises(StaleLensError):
        probe.check(plain, LENS)
    Probe.measure(plain, corpus, "all", 64).check(plain, LENS)
    config = families.FAMILIES["llama"]()
    config.vocab_size = 100
    with pytest.raises(StaleLensError, match="does not fit"):
        probe.check(build_model(config), LENS)
