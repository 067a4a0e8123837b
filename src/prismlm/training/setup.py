"""From a recipe to what a run needs: device, corpus, rows, decoder, head and control signals."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm import __version__
from prismlm.corpus.store import Corpus
from prismlm.corpus.windows import PackedDataset, pack
from prismlm.errors import InputError
from prismlm.layers import PrototypeHead, PrototypeMixer
from prismlm.models.decoders.signal_noise import SignalNoiseForCausalLM
from prismlm.models.device import uses_bf16
from prismlm.models.presets import build_config, build_model
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import attach_uncertainty
from prismlm.models.watch import evaluating
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes, neutral_code, shuffle_codes
from prismlm.training import parallel
from prismlm.training.evaluation import MAX_PASSES, HeldOut, token_counts
from prismlm.training.model import PrismForCausalLM, VocabularySample
from prismlm.training.parallel import Sharding, blocks, unsharded
from prismlm.training.recipe import EXEMPT, Exempt, Recipe

# By model type: the modules of a block that add to the residual stream, and the last matrices of
# its feed-forward network.
ATTENTION_AND_MLP = (("self_attn.o_proj", "mlp.down_proj"), ("mlp.down_proj",))
MIXER = (("mixer",), ())
DROPOUT_MODULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ATTENTION_AND_MLP),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), MIXER),
}
PROBE_LENGTH = 8
# Relative to the largest logit. With a mask the difference is exactly 0; in an untrained recurrent
# model the carried-over state can change logits by as little as a thousandth.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Prepared:
    """What a run needs, built from a recipe."""

    recipe: Recipe  # with its number of steps
    corpus: Corpus
    rows: PackedDataset
    heldout: HeldOut
    model: PrismForCausalLM  # prototypes not yet initialised; the decoder may be sharded

    def warning(self) -> str | None:
        """Return a warning if the run reads the same text more than four times."""
        recipe, rows = self.recipe, self.rows
        step = recipe.positions_per_step * parallel.world_size()
        passes = recipe.steps * step / (len(rows) * recipe.data.length)
        if passes < MAX_PASSES + 0.5:
            return None
        documents = recipe.data.documents or len(self.corpus.split("train"))
        steps = max(1, round(recipe.steps * MAX_PASSES / passes))
        return (
            f"{passes:,.0f} passes over {documents:,} documents: beyond {MAX_PASSES}, repeated "
            f"text is worth less and less. Use more text, or fewer steps (--set steps={steps})."
        )


def prepare(recipe: Recipe, without: Collection[int] = ()) -> Prepared:
    """Open the corpus, build the model and pack the training rows; errors are as of train()."""
    device = device_of(recipe)
    corpus = Corpus.open(recipe.corpus).without(without)
    sharding = Sharding.of_recipe(recipe, device)
    backbone = build_backbone(recipe, corpus, sharding)
    model = attach_head(recipe, backbone, corpus)
    if sharding is not None:
        sharding.apply(backbone)
    rows = training_rows(recipe, corpus, backbone)
    heldout = HeldOut(corpus, recipe.data.length, recipe.seed)
    # Raises now if there is no held-out text.
    heldout.batches(1)
    recipe = with_steps(recipe, rows)
    return Prepared(recipe, corpus, rows, heldout, model)


def describe_run(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Return everything that determines the result of a run."""
    device = device_of(recipe)
    precision = "bf16" if uses_bf16(recipe.precision, device) else "float32"
    return {
        "recipe": recipe.to_dict(),
        "resolved": {"device": device, "precision": precision},
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "processes": parallel.world_size(),
    }


def training_rows(recipe: Recipe, corpus: Corpus, backbone: Any) -> PackedDataset:
    """Return the training rows; documents share them if recipe and model allow it."""
    data = recipe.data
    share_rows = data.packing != "padded" and supports_packed_documents(backbone)
    if data.packing == "packed" and not share_rows:
        raise InputError(
            f"in models of type {backbone.config.model_type!r}, a document sees the previous one "
            "in the same training row: set data.packing to padded or auto."
        )
    documents = chosen_documents(corpus, data.documents)
    rows = pack(corpus, documents, data.length, recipe.seed, share_rows=share_rows)
    needed = recipe.batch_size * recipe.gradient_accumulation * parallel.world_size()
    if len(rows) < needed:
        raise InputError(
            f"the corpus {corpus.name!r} fills {len(rows)} rows of {data.length} tokens, but a "
            f"step takes {needed}: use more text, or lower batch_size or data.length."
        )
    if recipe.head.enabled and rows.num_tokens < recipe.head.prototypes:
        raise InputError(
            f"the corpus {corpus.name!r} has {rows.num_tokens} training positions, fewer than the "
            f"{recipe.head.prototypes} prototypes: use more text, or lower head.prototypes."
        )
    return rows


def chosen_documents(corpus: Corpus, count: int | None) -> np.ndarray:
    """Return the training documents, or a random subset that is the same for every seed."""
    documents = corpus.split("train")
    if count is None:
        return documents
    if count > len(documents):
        raise InputError(
            f"data.documents is {count}, but the corpus {corpus.name!r} has {len(documents)}."
        )
    return np.sort(np.random.default_rng(0).permutation(documents)[:count])


def with_steps(recipe: Recipe, rows: PackedDataset) -> Recipe:
    """Return the recipe with its steps; the last step of an epoch may have fewer micro-batches."""
    if recipe.steps or recipe.epochs is None:
        return recipe
    micro_batches = len(rows) // (recipe.batch_size * parallel.world_size())
    steps = recipe.epochs * math.ceil(micro_batches / recipe.gradient_accumulation)
    recipe = recipe.model_copy(update={"steps": steps})
    recipe.check_initialisation_step()
    return recipe


def build_backbone(recipe: Recipe, corpus: Corpus, sharding: Sharding | None = None) -> Any:
    """Build the decoder of a recipe, with random weights from its seed; on meta to be sharded."""
    vocab_size = len(corpus.tokenizer)
    config = build_config(dict(recipe.model), vocab_size, corpus.eos_token_id)
    torch.manual_seed(recipe.seed)
    model = build_model(config) if sharding is None else sharding.build(lambda: build_model(config))
    has_noise = isinstance(model, SignalNoiseForCausalLM)
    if (recipe.noise_weight is not None) > has_noise or "noise_weight" in recipe.model:
        raise InputError(
            "noise_weight is a section of its own in a recipe, and for models of type "
            f"'prismlm_signal_noise' alone; this one is of type {config.model_type!r}."
        )
    add_dropout(model, recipe.dropout)
    return model


def add_dropout(decoder: Any, rate: float) -> None:
    """Add dropout to a decoder, by hooks that act in training mode and are not saved.

        e ← dropout(e),   h ← h + dropout(part(norm(h))),   mlp(x) = W_down dropout(inner(x))

    on the token embeddings, on what a block adds to the residual stream, and on the input of the
    last matrix of a feed-forward network, in addition to dropout that the decoder has itself.

    Source: ProtoT, §4 (Dropout).
    """
    if not rate:
        return
    family = decoder.config.model_type
    if family not in DROPOUT_MODULES:
        raise InputError(
            f"the recipe sets dropout, which is for models of type {', '.join(DROPOUT_MODULES)}, "
            f"not {family!r}: leave it out, or use the model's own settings."
        )

    def drop_output(module: nn.Module, inputs: Any, output: Any) -> Any:
        return F.dropout(output, rate, module.training)

    def drop_input(module: nn.Module, inputs: Any) -> Any:
        return (F.dropout(inputs[0], rate, module.training),)

    decoder.get_input_embeddings().register_forward_hook(drop_output)
    added, last = DROPOUT_MODULES[family]
    for block in blocks(decoder):
        for name in added:
            block.get_submodule(name).register_forward_hook(drop_output)
        for name in last:
            block.get_submodule(name).register_forward_pre_hook(drop_input)


def decayed_names(model: nn.Module, exempt: Collection[Exempt] = EXEMPT) -> set[str]:
    """Return the names of the trained matrices with weight decay.

    Vectors have none, nor do ``exempt`` matrices: ``embeddings`` (and a tied output embedding),
    ``prototypes`` of mixers, and ``decays``, the matrices that decays are computed from.

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
    """Test whether documents that share a row do not affect each other.

    Most decoders derive a mask from position ids that restart at 0; recurrent ones do not.
    """
    weight = weight_of(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(weight.shape[0], (3, PROBE_LENGTH), generator=generator)
    rows = torch.stack([torch.cat([tokens[0], tokens[2]]), torch.cat([tokens[1], tokens[2]])])
    positions = torch.arange(PROBE_LENGTH).repeat(2).expand(2, -1)
    inputs = {"input_ids": rows.to(weight.device), "position_ids": positions.to(weight.device)}
    # Otherwise a sharded model would keep the weights outside its blocks whole.
    with unsharded(model), evaluating(model):
        logits = model(**inputs, use_cache=False).logits[:, PROBE_LENGTH:]
    difference = (logits[0] - logits[1]).abs().max().item()
    return difference <= TOLERANCE * logits.abs().max().item()


def attach_head(recipe: Recipe, backbone: Any, corpus: Corpus) -> PrismForCausalLM:
    """Add a random head, and any uncertainty feedback, of a recipe to its decoder.

    torch's global generator is not used.
    """
    feedback = recipe.uncertainty_feedback
    if feedback.enabled:
        table = feedback.model_dump(include={"levels", "rows", "deviation", "passes"})
        attached = attach_uncertainty(backbone, **table)
        if attached.embedding.weight.is_meta:
            attached.embedding.to_empty(device="cpu").seen.zero_()
        attached.embedding.reset_parameters(torch.Generator().manual_seed(recipe.seed))
    settings, (vocabulary, width) = recipe.head, weight_of(backbone).shape
    head = PrototypeHead(
        width, settings.prototypes, settings.prototypes_per_token, scale=settings.scale
    )
    head.reset_parameters(torch.Generator().manual_seed(recipe.seed))
    model = PrismForCausalLM(
        backbone,
        head,
        weights=recipe.losses,
        detach=settings.detach,
        residual_reduction=recipe.losses.residual_reduction,
        position_share=settings.position_share,
        initialised=False,
    )
    if settings.enabled:
        model.vocabulary = vocabulary_sample(recipe, corpus, vocabulary)
    return model


class ShuffledSignal:
    """A control: permutes the codes of a micro-batch over its positions in all processes.

    The permutation depends on the seed, the step and the number of the micro-batch.
    """

    def __init__(self, seed: int, step: Callable[[], int] = lambda: 0) -> None:
        self._seed, self._step = seed, step
        self._last, self._number = -1, 0

    def __call__(self, codes: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return permuted codes for this process's rows; every process has to call."""
        step = self._step()
        self._number = self._number + 1 if step == self._last else 0
        self._last = step
        sequence = np.random.SeedSequence([self._seed, step, self._number])
        generator = torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
        shuffled = shuffle_codes(parallel.concatenate(codes), generator)
        return shuffled[parallel.rank() * len(codes) :][: len(codes)]


class PreviousBatch:
    """A control: feeds back the codes of the previous batch, as the source's pseudo-code does.

        c_t of batch n = code of the entropy at position t − 1 of the same row of batch n − 1

    Missing codes are neutral, all of them if the number of rows changes; first tokens have none.

    Source: PRISMA, "Forward Pass Modifications".
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self.codes: Int64[Tensor, "B S"] | None = None  # of the last batch

    def __call__(self, codes: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return what is fed back in place of a batch's own codes."""
        previous = torch.full_like(codes, neutral_code(self._levels))
        if self.codes is not None and len(self.codes) == len(codes):
            known = self.codes[:, : codes.shape[1] - 1]
            previous[:, 1 : known.shape[1] + 1] = known
        previous[:, 0] = NO_CODE
        return previous

    def remember(self, logits: Float[Tensor, "B S V"]) -> None:
        """Keep the codes of a batch's predictions for the next batch."""
        self.codes = entropy_codes(logits, self._levels)

    def after_forward(self, model: Any, args: Any, output: Any) -> None:
        """Keep the codes of a forward pass in training: a forward hook."""
        if model.training:
            self.remember(output.logits)


def set_training_signal(recipe: Recipe, model: PrismForCausalLM) -> PreviousBatch | None:
    """Set what a recipe feeds back in training; return a signal that has codes of its own."""
    settings, feedback = recipe.uncertainty_feedback, model.uncertainty
    if feedback is not None and settings.signal == "shuffled":
        feedback.rearrange = ShuffledSignal(recipe.seed, lambda: model.step)
    if feedback is None or settings.signal != "previous_batch":
        return None
    feedback.rearrange = signal = PreviousBatch(settings.levels)
    feedback.model.register_forward_hook(signal.after_forward)
    return signal


def vocabulary_sample(recipe: Recipe, corpus: Corpus, vocabulary: int) -> VocabularySample | None:
    """Return the vocabulary sample for the KL, a quarter of it random; None for all tokens."""
    size = recipe.losses.kl_tokens
    if not recipe.losses.prototype_only_kl or vocabulary <= size:
        return None
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    counts[: len(corpus.tokenizer)] = torch.from_numpy(token_counts(corpus, "train"))
    return VocabularySample(counts, size - size // 4, size // 4)


def device_of(recipe: Recipe) -> str:
    """Return the device type that a recipe runs on: cuda, mps or cpu."""
    if recipe.device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "the recipe's device is cuda, but torch finds no CUDA GPU: use --set device=cpu."
        )
    return recipe.device


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, prismlm and the installed packages among ``packages``."""
    installed = {"prismlm": __version__, "python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
