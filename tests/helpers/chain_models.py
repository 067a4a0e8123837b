"""A random model of prototype mixers with a head, as a model directory without a lens."""

import torch

from prismlm.corpus import Corpus
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from tests.helpers.mixer_models import make_model

TEXT = "The patient was given a dose of the drug"


def chain_model(corpus, directory):
    """Write a model for the tokenizer of a corpus, and return its directory."""
    tokenizer = Corpus.open(corpus).tokenizer
    model = make_model(len(tokenizer))
    head = PrototypeHead(model.config.hidden_size, 64, 6, scale=2.0)
    head.reset_parameters(torch.Generator().manual_seed(3))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_sidecar(directory, Sidecar(head, LogitMap.of(model), base_of(model)))
    return directory
