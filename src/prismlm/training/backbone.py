"""The decoder of a run: built, with dropout where its class has none, and asked about."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prismlm.corpus.store import Corpus
from prismlm.errors import InputError
from prismlm.layers import PrototypeMixer
from prismlm.models.evaluating import evaluating
from prismlm.models.presets import build_config, build_model
from prismlm.models.sidecar import weight_of
from prismlm.training.noise_weight import check_noise_weight_of
from prismlm.training.parallel import blocks
from prismlm.training.recipe import EXEMPT, Exempt, Recipe

# What a block adds to the residual stream, and where its feed-forward network ends, by family.
ATTENTION_AND_MLP = (("self_attn.o_proj", "mlp.down_proj"), ("mlp.down_proj",))
MIXER = (("mixer",), ())
DROPOUT_MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ATTENTION_AND_MLP),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), MIXER),
}
PIECE = 8
# Of the largest logit. A mask makes the difference exactly 0; a state that is carried over can
# weigh as little as a thousandth in a model that has learned nothing yet.
TOLERANCE = 1e-5


def build_backbone(recipe: Recipe, corpus: Corpus) -> Any:
    """Build the decoder of a recipe; weights are drawn from its seed."""
    vocab_size = len(corpus.tokenizer)
    config = build_config(dict(recipe.model), vocab_size, corpus.eos_token_id)
    if getattr(config, "vocab_size", vocab_size) < vocab_size:
        raise InputError(
            f"the corpus {corpus.name!r} has {vocab_size} tokens, and the model only "
            f"{config.vocab_size}. Build the corpus with this model's tokenizer."
        )
    torch.manual_seed(recipe.seed)
    model = build_model(config)
    check_noise_weight_of(recipe, model)
    add_dropout(model, recipe.dropout)
    return model


def add_dropout(decoder: Any, rate: float) -> None:
    """Put dropout into a decoder: nothing of it is saved, and it acts in training mode alone.

        e ← dropout(e),   h ← h + dropout(part(norm(h))),   mlp(x) = W_down dropout(inner(x))

    after the token embeddings, on what every part of a block adds to the residual stream, and on
    what enters the last matrix of a feed-forward network, where there is one. Dropout that the
    class has of its own, such as ``attention_dropout``, is beside it.

    Source: ProtoT, §4 (Dropout), for all of the models that it compares.
    """
    if not rate:
        return
    family = decoder.config.model_type
    if family not in DROPOUT_MODULES:
        own = sorted(key for key in decoder.config.to_dict() if "drop" in key)
        hint = f" Its own settings are {', '.join('model.' + key for key in own)}." if own else ""
        raise InputError(
            f"the recipe sets dropout to {rate:g}, and where it goes is known for models of type "
            f"{', '.join(DROPOUT_MODULES)}, not {family!r}. Leave it out.{hint}"
        )
    # Not models.watch: these stand as long as the model does, for whoever trains it.
    leaving, entering = partial(_leaving, rate), partial(_entering, rate)
    decoder.get_input_embeddings().register_forward_hook(leaving)
    added, inner = DROPOUT_MODULES[family]
    for block in blocks(decoder):
        for name in added:
            block.get_submodule(name).register_forward_hook(leaving)
        for name in inner:
            block.get_submodule(name).register_forward_pre_hook(entering)


def _leaving(rate: float, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return F.dropout(output, rate, module.training)


def _entering(rate: float, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (F.dropout(inputs[0], rate, module.training),)


def decayed_names(model: nn.Module, exempt: Collection[Exempt] = EXEMPT) -> set[str]:
    """Return the names of the trained matrices that decay; tied ones have one name.

    Vectors never do: norms, biases, temperatures, decays and α. Nor do, if they are ``exempt``:
    ``embeddings``, a tied output embedding with them; the ``prototypes`` of mixers, which are
    embeddings of their channels; and ``decays``, the matrices behind decays by token or by state.

    Source: ProtoT, A.4: affine weights decay; embeddings, norms and biases do not.
    """
    kinds: dict[int, Exempt] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            kinds[id(module.weight)] = "embeddings"
        elif isinstance(module, PrototypeMixer):
            kinds |= {id(module.prototypes): "prototypes", id(module.decay_map): "decays"}
        elif isinstance(log_decay := getattr(module, "A_log", None), nn.Parameter):
            kinds[id(log_decay)] = "decays"
    return {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim > 1 and kinds.get(id(p)) not in exempt
    }


@torch.no_grad()
def supports_packed_documents(model: Any) -> bool:
    """Say whether a document changes nothing for the next one in its row.

    Most decoders derive a mask from position ids that start at 0 again; recurrent ones and some
    with positions of their own do not. In shared rows they would learn, and be attributed, across
    documents that have nothing to do with each other.
    """
    weight = weight_of(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(weight.shape[0], (3, PIECE), generator=generator)
    rows = torch.stack([torch.cat([tokens[0], tokens[2]]), torch.cat([tokens[1], tokens[2]])])
    positions = torch.arange(PIECE).repeat(2).expand(2, -1)
    given = {"input_ids": rows.to(weight.device), "position_ids": positions.to(weight.device)}
    with evaluating(model):
        logits = model(**given, use_cache=False).logits[:, PIECE:]
    difference = (logits[0] - logits[1]).abs().max().item()
    return difference <= TOLERANCE * logits.abs().max().item()
