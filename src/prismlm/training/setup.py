"""From a recipe to what is trained on what: device, corpus, rows, decoder and head."""

from __future__ import annotations

import math
import platform
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prismlm import __version__
from prismlm.corpus.packing import PackedDataset, pack
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError
from prismlm.layers import PrototypeHead, PrototypeMixer
from prismlm.models.device import uses_bf16
from prismlm.models.presets import build_config, build_model
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import attach_uncertainty
from prismlm.models.watch import evaluating
from prismlm.training import parallel
from prismlm.training.evaluation import MAX_PASSES, HeldOut, token_counts
from prismlm.training.losses import VocabularySample
from prismlm.training.model import PrismForCausalLM, Usage
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


@dataclass(frozen=True)
class Prepared:
    """What a run needs, built from a recipe.

    Attributes:
        recipe: the recipe, its steps known.
        corpus: the opened corpus.
        rows: its packed training rows.
        heldout: its held-out text.
        model: the model with its head, prototypes not placed yet.
    """

    recipe: Recipe
    corpus: Corpus
    rows: PackedDataset
    heldout: HeldOut
    model: PrismForCausalLM

    def provenance(self, *, steps: int, tokens: int) -> dict[str, Any]:
        """Return how the model was made, as it stands in ``prismlm.json``."""
        return {
            **described(self.recipe, self.corpus),
            "seed": self.recipe.seed,
            "steps": steps,
            "tokens": tokens,
            "head_placed": self.model.placed,
            "versions": versions("torch", "transformers"),
        }

    def warning(self) -> str | None:
        """Say so where the run reads the same text again and again; None up to four passes."""
        recipe, rows = self.recipe, self.rows
        read = recipe.steps * recipe.positions_per_step * parallel.world_size()
        passes = read / (len(rows) * recipe.data.length)
        if passes < MAX_PASSES + 0.5:
            return None
        count = recipe.data.documents or len(self.corpus.split("train"))
        enough = max(1, round(recipe.steps * MAX_PASSES / passes))
        return (
            f"{passes:,.0f} passes over {count:,} documents: beyond {MAX_PASSES}, repeated text "
            "teaches a model less and less, and it may learn it by heart. Use more text, or fewer "
            f"steps (--set steps={enough})."
        )


def prepare(recipe: Recipe) -> Prepared:
    """Open the corpus, build the model and lay out its training rows.

    Raises:
        InputError: the device is not there; the corpus is missing, of another vocabulary than
            the model, or too small; documents that share a row would see each other.
        FormatError: the corpus is damaged.
    """
    device_of(recipe)
    corpus = Corpus.open(recipe.corpus)
    backbone = build_backbone(recipe, corpus)
    rows = training_rows(recipe, corpus, backbone)
    heldout = HeldOut(corpus, recipe.data.length, recipe.seed)
    heldout.batches(1)
    recipe = with_steps(recipe, rows)
    return Prepared(recipe, corpus, rows, heldout, attach_head(recipe, backbone, corpus))


def described(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Return what a run is: all that decides its result."""
    return {
        "recipe": recipe.to_dict(),
        "resolved": resolved(recipe),
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "processes": parallel.world_size(),
    }


def training_rows(recipe: Recipe, corpus: Corpus, backbone: Any) -> PackedDataset:
    """Return the training rows of a recipe, shared by documents where the model allows it."""
    data = recipe.data
    share_rows = data.packing != "padded" and supports_packed_documents(backbone)
    if data.packing == "packed" and not share_rows:
        raise InputError(
            f"models of type {backbone.config.model_type!r} let a document see the one before it "
            "in the same training row: they do not start anew where position ids do. Set "
            "data.packing to padded or auto, so that every row holds one document."
        )
    documents = chosen_documents(corpus, data.documents)
    rows = pack(corpus, documents, data.length, recipe.seed, share_rows=share_rows)
    needed = recipe.batch_size * recipe.gradient_accumulation * parallel.world_size()
    if len(rows) < needed:
        raise InputError(
            f"the corpus {corpus.name!r} fills {len(rows)} rows of {data.length} tokens, "
            f"and one step takes {needed}. Use more text, or lower batch_size, "
            "gradient_accumulation or data.length."
        )
    if rows.num_tokens < recipe.head.prototypes:
        raise InputError(
            f"the corpus {corpus.name!r} has {rows.num_tokens} positions to train on, and "
            f"{recipe.head.prototypes} prototypes are to be placed on different ones. Use more "
            "text, or lower head.prototypes."
        )
    return rows


def chosen_documents(corpus: Corpus, count: int | None) -> np.ndarray:
    """Return the numbers of training documents: all, or so many drawn alike whatever the seed."""
    documents = corpus.split("train")
    if count is None:
        return documents
    if count > len(documents):
        raise InputError(
            f"data.documents is {count}, and the corpus {corpus.name!r} has {len(documents)} to "
            "train on. Use more text, or lower it."
        )
    return np.sort(np.random.default_rng(0).permutation(documents)[:count])


def with_steps(recipe: Recipe, rows: PackedDataset) -> Recipe:
    """Return a recipe whose steps are known: those of its epochs, if it has none.

    The last step of an epoch takes the micro-batches that are left. Rows that do not fill one in
    every process are not seen in that epoch.
    """
    if recipe.steps or recipe.epochs is None:
        return recipe
    micro_batches = len(rows) // (recipe.batch_size * parallel.world_size())
    steps = recipe.epochs * math.ceil(micro_batches / recipe.gradient_accumulation)
    counted = recipe.model_copy(update={"steps": steps})
    try:
        counted.check_placing()
    except ValueError as error:
        raise InputError(f"{error}.") from None
    return counted


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


def attach_head(recipe: Recipe, backbone: Any, corpus: Corpus) -> PrismForCausalLM:
    """Put head and feedback of a recipe beside its decoder, prototypes not placed yet."""
    feedback = recipe.uncertainty_feedback
    if feedback.enabled:
        attached = attach_uncertainty(
            backbone,
            feedback.levels,
            rows=feedback.rows,
            deviation=feedback.deviation,
            passes=feedback.passes,
        )
        # From a generator of its own, as the head.
        attached.embedding.reset_parameters(torch.Generator().manual_seed(recipe.seed))
    model = PrismForCausalLM(
        backbone,
        head_of(recipe, backbone),
        weights=recipe.losses.weights(),
        detach=recipe.head.detach,
        residual_reduction=recipe.losses.residual_reduction,
        position_share=recipe.head.position_share,
        placed=False,
    )
    if recipe.head.enabled:
        model.vocabulary = vocabulary_sample(recipe, corpus, weight_of(backbone).shape[0])
        if recipe.head.revive_every:
            model.usage = Usage(recipe.head.prototypes)
    return model


def vocabulary_sample(recipe: Recipe, corpus: Corpus, tokens: int) -> VocabularySample | None:
    """Return what of a larger vocabulary the KL is taken over in a step, a quarter of it drawn."""
    size = recipe.losses.kl_tokens
    if not recipe.losses.prototype_only_kl or tokens <= size:
        return None
    counts = torch.zeros(tokens, dtype=torch.int64)
    counts[: len(corpus.tokenizer)] = torch.from_numpy(token_counts(corpus, "train"))
    return VocabularySample(counts, size - size // 4, size // 4)


def head_of(recipe: Recipe, backbone: Any) -> PrototypeHead:
    """Return a recipe's head for a decoder, drawn at random from a generator of its own."""
    settings, width = recipe.head, weight_of(backbone).shape[1]
    head = PrototypeHead(
        width, settings.prototypes, settings.prototypes_per_token, scale=settings.scale
    )
    head.reset_parameters(torch.Generator().manual_seed(recipe.seed))
    return head


def device_of(recipe: Recipe) -> str:
    """Return the type of the device a recipe runs on here: cuda, mps or cpu."""
    if recipe.device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if recipe.device == "cuda" and not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        raise InputError(
            f"the recipe's device is cuda, and torch finds no CUDA GPU here{built}. Run it on a "
            "machine with one, or on this CPU with --set device=cpu."
        )
    return recipe.device


def resolved(recipe: Recipe) -> dict[str, str]:
    """Return what the settings that ask the machine come to here."""
    device = device_of(recipe)
    precision = "bf16" if uses_bf16(recipe.precision, device) else "float32"
    return {"device": device, "precision": precision}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, of prismlm and of those packages that are installed."""
    known = {"prismlm": __version__, "python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            known[package] = version(package)
    return known
