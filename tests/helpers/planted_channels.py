"""Words of a small corpus, and a model with a channel made to order for one of them."""

import torch

from tests.helpers.mixer_models import make_model

PLACE = (0, 4)


def words_by_tokens(corpus):
    """Words of the corpus that are one token, and those that are several."""
    texts = {w for i in range(len(corpus)) for w in corpus.text(i).replace(".", "").split()[1:]}
    encoded = {w: corpus.tokenizer(f" {w}")["input_ids"] for w in sorted(texts)}
    single = [w for w, ids in encoded.items() if len(ids) == 1 and w.isalpha() and len(w) > 2]
    several = [w for w, ids in encoded.items() if len(ids) > 1 and w.islower()]
    assert len(single) > 3
    assert several
    return single, several


def planted_model(corpus, word):
    """A model whose channel 4 of layer 0 is written at one word above all; others write evenly."""
    model = make_model(len(corpus.tokenizer))
    for block in model.model.layers:
        block.mixer.prototypes.zero_()
    token = corpus.tokenizer(f" {word}")["input_ids"][0]
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = 0
    embeddings[token] = torch.eye(embeddings.shape[1])[0]
    model.model.layers[PLACE[0]].mixer.prototypes[PLACE[1], 0] = 5.0
    return model
