"""Training on an existing model: adapters, a table of codes, and again without some documents."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.corpus.store import Corpus
from prismlm.corpus.windows import IGNORED, PackedDataset, pack
from prismlm.errors import InputError, PrismError
from prismlm.files import WAY_OUT, atomic_directory, room_to_write, share, write_json
from prismlm.lens.opened_model import OpenedModel
from prismlm.models.base import adapter_updates, find_base, merge_adapter
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import uses_bf16
from prismlm.models.sidecar import load_sidecar
from prismlm.models.uncertainty_feedback import CODES, attach_uncertainty, uncertainty_of
from prismlm.models.watch import evaluating
from prismlm.ops.uncertainty_feedback import NO_CODE, shuffle_codes
from prismlm.progress import SILENT, Reporter
from prismlm.training import parallel
from prismlm.training.evaluation import HeldOut
from prismlm.training.fit import Loop, batches, check_options, num_steps
from prismlm.training.parallel import blocks
from prismlm.training.recipe import build_recipe
from prismlm.training.run import train
from prismlm.training.setup import supports_packed_documents

# Tokens per forward pass; more are no faster, and their logits take memory.
TOKENS_PER_PASS = 1024
ALPHA_OVER_RANK = 2
ADAPTER, NOTE_FILE = "adapter", "fine-tuning.json"


@dataclass(frozen=True)
class TuningOptions:
    """How adapters or a table are trained."""

    epochs: float = 1.0  # passes over the corpus; may be fractional
    learning_rate: float = 5e-4  # peak rate of Adam
    batch: int = 8  # rows per step
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class LoraOptions(TuningOptions):
    """How a model is fine-tuned with low-rank adapters."""

    rank: int = 8
    # Fraction of the blocks that get adapters, counted from the last: the others need no backward
    # pass, which takes most of the time.
    blocks: float = 1 / 3
    # Tokens per row, by default the window. Short texts, such as chats, train faster in short rows.
    length: int | None = None


@dataclass(frozen=True)
class TableOptions(TuningOptions):
    """How a table of uncertainty codes is trained: 64 rows, from zero, with two passes."""

    learning_rate: float = 3e-3


def with_adapters(model: PreTrainedModel, options: LoraOptions) -> Any:
    """Add adapters to the linear layers of the last blocks; return the PEFT model."""
    from peft import LoraConfig, get_peft_model

    all_blocks = blocks(model)
    count = max(1, round(options.blocks * len(all_blocks)))
    adapted = {module for block in all_blocks[-count:] for module in block.modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if module in adapted
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    config = LoraConfig(
        r=options.rank,
        lora_alpha=ALPHA_OVER_RANK * options.rank,
        target_modules=linear,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # PEFT uses deprecated names of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(options.seed)
        return get_peft_model(model, config).train()


def adapt(
    model: PreTrainedModel,
    corpus: Corpus,
    options: LoraOptions,
    out: Path,
    *,
    base: str,
    window: int,
    bf16: bool = False,
    shards: str | None = None,
    progress: Reporter = SILENT,
) -> None:
    """Train adapters on the training documents of a corpus and write them to ``out``.

    With ``shards``, a device, the frozen weights are divided among the processes, one shard on the
    device of each.
    """
    rows = _training_rows(model, corpus, min(options.length or window, window), options.seed)
    if bf16:
        # Frozen weights need not be cast in every pass; adapters stay float32.
        for weight in model.parameters():
            # Not model.bfloat16(), which would round the angles of rotary positions too.
            weight.data = weight.data.bfloat16()
    adapted = with_adapters(model, options)
    if shards is not None:
        parallel.shard_frozen(model, shards)
    training = Tuning(adapted, rows, options, bf16=bf16)
    training.run_all("Fine-tuning", progress)
    tokens = round(training.steps * options.batch * rows.num_tokens / len(rows))
    note: dict[str, float] = {"tokens": tokens, "steps": training.steps}
    parallel.on_main(lambda: write_adapter(training.learned, adapted, base, out, note))


def write_adapter(
    learned: Iterable[nn.Parameter], adapted: Any, base: str, out: Path, note: dict[str, float]
) -> None:
    """Write adapters to ``out`` in PEFT's format and in bfloat16, with a note of how they came."""
    with room_to_write("the adapter", out.parent, WAY_OUT), atomic_directory(out) as directory:
        for parameter in learned:
            parameter.data = parameter.data.bfloat16()
        # The base's name instead of its local path.
        adapted.peft_config["default"].base_model_name_or_path = base
        # By default PEFT asks the hub whether the vocabulary has changed.
        adapted.save_pretrained(directory, save_embedding_layers=False)
        # PEFT's unfilled model card.
        (directory / "README.md").unlink(missing_ok=True)
        share(directory)
        write_json(directory / NOTE_FILE, note)


def train_table(
    model: PreTrainedModel,
    corpus: Corpus,
    options: TableOptions,
    *,
    window: int,
    bf16: bool = False,
    progress: Reporter = SILENT,
) -> None:
    """Add a table of uncertainty codes to a model and train it, and nothing else, on a corpus."""
    if (earlier := uncertainty_of(model)) is not None:
        # From a run that was interrupted before its table was measured.
        earlier.detach()
    rows = _training_rows(model, corpus, window, options.seed)
    model.requires_grad_(False)
    table = attach_uncertainty(model).embedding
    dtype = table.weight.dtype
    # bfloat16 would round Adam's steps away.
    table.float().requires_grad_(True)
    model.train()
    training = Tuning(model, rows, options, bf16=bf16)
    training.run_all("Training the table of uncertainty codes", progress)
    # Each process has seen the codes of its own rows.
    table.seen.copy_(parallel.sum_over_processes(table.seen.int()) > 0)
    model.eval()
    table.to(dtype).requires_grad_(False)


def _training_rows(model: PreTrainedModel, corpus: Corpus, length: int, seed: int) -> PackedDataset:
    share_rows = supports_packed_documents(model)
    return pack(corpus, corpus.split("train"), length, seed, share_rows=share_rows)


class Tuning(Loop):
    """Trains the parameters of a model that require a gradient."""

    what = "fine-tuning"
    remedy = "give its options a lower learning_rate"

    def __init__(
        self, model: Any, rows: PackedDataset, options: TuningOptions, *, bf16: bool
    ) -> None:
        self.learned = [p for p in model.parameters() if p.requires_grad]
        steps = num_steps(len(rows), options.batch, options.epochs)
        super().__init__([{"params": self.learned, "lr": options.learning_rate}], steps)
        self._model, self._rows, self._options, self._bf16 = model, rows, options, bf16

    def run_all(self, title: str, progress: Reporter) -> None:
        """Take all steps; the seed also determines dropout."""
        options, device = self._options, self._model.device
        rows = batches(len(self._rows), options.batch, self.steps, options.seed)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(options.seed)
            self.run(rows, title, "ce", progress)

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Accumulate the gradients of the mean cross-entropy; return its part in nats per token."""
        batch = [self._rows[row] for row in rows.tolist()]
        labelled = sum(int((row["labels"] != IGNORED).sum()) for row in batch)
        count = max(1, int(parallel.sum_over_processes(torch.tensor(labelled))))
        total = 0.0
        size = max(1, TOKENS_PER_PASS // self._rows.length)
        # Processes that share a model make every pass together, if need be without a label.
        passes = int(parallel.largest(torch.tensor(-(-len(batch) // size))))
        for first in range(0, passes * size, size):
            loss = self._summed_loss(batch[first : first + size] or self._unlabelled()) / count
            loss.backward()
            total += loss.item()
        return {"ce": total, "loss": total}

    def _unlabelled(self) -> list[dict[str, Tensor]]:
        row = self._rows[0]
        return [row | {"labels": torch.full_like(row["labels"], IGNORED)}]

    def _summed_loss(self, rows: list[dict[str, Tensor]]) -> Tensor:
        device = self._model.device
        inputs = {n: torch.stack([row[n] for row in rows]).to(device) for n in rows[0]}
        labels = inputs.pop("labels")[:, 1:]
        del inputs["token_mask"]
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
            logits = self._model(**inputs, use_cache=False).logits[:, :-1]
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def effect_of_table(model: PreTrainedModel, text: HeldOut, tokens: int) -> dict[str, float]:
    """Return the cross-entropy on held-out text, in nats per token, by the codes that are fed back.

    ``ce`` is with the model's own codes, ``ce_without`` with none, and the control ``ce_shuffled``
    with its codes permuted over the positions of a batch.
    """
    generator = torch.Generator().manual_seed(0)
    sums, count = dict.fromkeys(("ce", "ce_without", "ce_shuffled"), 0.0), 0
    with evaluating(model):
        for batch in text.batches(tokens):
            ids, attended, scored = batch.scored_on(model.device)
            inputs = {"input_ids": ids, "attention_mask": attended, "use_cache": False}
            output = model(**inputs)
            codes: Tensor = output[CODES]
            controls = (torch.full_like(codes, NO_CODE), shuffle_codes(codes, generator))
            logits = [output.logits, *(model(**inputs, **{CODES: c}).logits for c in controls)]
            count += int(scored.sum())
            for name, prediction in zip(sums, logits, strict=True):
                predicted = prediction[:, :-1][scored].float()
                loss = F.cross_entropy(predicted, ids[:, 1:][scored], reduction="sum")
                sums[name] += loss.item()
    return {name: total / count for name, total in sums.items()} | {"tokens": count}


def train_without(
    lm: OpenedModel, doc_ids: Collection[str], *, progress: Reporter = SILENT
) -> PreTrainedModel:
    """Return a model trained as ``lm`` was, without documents of its lens's corpus.

    A model of ``prismlm train`` is trained by its recipe, to its head's last step; one of ``prismlm
    attach --lora`` has its adapter taken out, and another trained on the remaining documents. Seed
    and settings are the same, and rows are packed anew. InputError if the directory does not say
    how it was trained, or its corpus is missing or not that of the lens.
    """
    provenance = load_sidecar(lm.path).provenance or {}
    attached: dict[str, Any] = provenance.get("attached") or {}
    names = [field.name for field in fields(LoraOptions) if f"lora.{field.name}" in attached]
    if not provenance.get("recipe") and not (names and (lm.path / ADAPTER).is_dir()):
        raise InputError(
            f"{lm.path} does not say how it was trained on these documents: expected the recipe of "
            "`train`, or the adapter of `attach --lora`. Leave out --retrain for the estimates."
        )
    read: dict[str, str] = attached.get("read") or provenance.get("corpus") or {}
    lens, left_out = lm.lens_for("document to leave out"), set(doc_ids)
    corpus = lens.corpus_for("training again reads it")
    if read.get("fingerprint") != corpus.fingerprint:
        raise InputError(
            f"the lens {lens.name} is of another corpus than {lm.path} was trained on: choose the "
            "lens of its training text with --lens."
        )
    documents = [n for n, doc_id in enumerate(corpus.doc_ids) if doc_id in left_out]
    with tempfile.TemporaryDirectory() as name:
        if provenance.get("recipe"):
            settings = {**provenance["recipe"], "corpus": corpus.path, "out": Path(name) / "model"}
            # The settings of an earlier version's evaluations may be gone; they change no weight.
            recipe = build_recipe(settings | {"evaluation": {}}, str(lm.path))
            # One process takes as many rows together as those that trained the model.
            rows = recipe.batch_size * provenance.get("processes", 1)
            recipe = recipe.model_copy(update={"batch_size": rows})
            train(recipe, without=documents, progress=progress)
            return read_checkpoint(recipe.out, device=lm.model.device.type)[0]
        model, adapter = untaught(lm), Path(name) / ADAPTER
        options = LoraOptions(**{name: attached[f"lora.{name}"] for name in names})
        how = {"window": attached["window"], "base": lm.path.name, "progress": progress}
        how["bf16"] = uses_bf16(attached["precision"], lm.model.device.type)
        adapt(untaught(lm), corpus.without(documents), options, adapter, **how)
        merge_adapter(model, adapter)
        return model


@torch.no_grad()
def untaught(lm: OpenedModel) -> PreTrainedModel:
    """Return the model before its fine-tuning: the adapter is subtracted from float32 weights.

    Weights in half precision do not say what they were before: they are read from the base.
    """
    device = lm.model.device.type
    model, base = read_checkpoint(lm.path, device=device)[0], load_sidecar(lm.path).base
    if any(weight.dtype.itemsize < 4 for weight in model.parameters()):
        try:
            path = find_base(base.name, base.revision).path
            plain = read_checkpoint(path, device=device)[0]
            load_sidecar(lm.path, plain)
            for name, update in adapter_updates(model, lm.path / ADAPTER):
                weight, before = model.get_parameter(name), plain.get_parameter(name)
                if not torch.equal((before.double() + update).to(weight.dtype), weight):
                    raise InputError(f"with the adapter, {name} is not that of the model.")
                weight.copy_(before)
        except PrismError as error:
            raise InputError(
                f"an adapter cannot be taken out of {lm.path}, which is in half precision, and "
                f"its base {base.name} cannot be used instead: {error}"
            ) from error
        return model
    for name, update in adapter_updates(model, lm.path / ADAPTER):
        weight = model.get_parameter(name)
        weight.copy_(weight.double() - update)
    return model
