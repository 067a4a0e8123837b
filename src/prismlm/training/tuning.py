"""Training beside a model that exists, before a head is attached to it.

Low-rank adapters fine-tune it on a corpus; a table of uncertainty codes leaves its weights as they
are.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.corpus.packing import IGNORED, PackedDataset, pack
from prismlm.corpus.store import Corpus
from prismlm.errors import InputError, check_number
from prismlm.files import WAY_OUT, atomic_directory, room_to_write, share, write_json
from prismlm.models.uncertainty_feedback import CODES, attach_uncertainty, uncertainty_of
from prismlm.models.watch import evaluating
from prismlm.ops.uncertainty_feedback import NO_CODE, shuffle_codes
from prismlm.progress import SILENT, Reporter
from prismlm.training.evaluation import HeldOut, summed_cross_entropy
from prismlm.training.loop import Loop, batches, check_options
from prismlm.training.parallel import blocks
from prismlm.training.setup import supports_packed_documents

# Tokens of a forward pass; more are no faster, and their logits take memory.
TOKENS_AT_ONCE = 1024
ALPHA_OVER_RANK = 2
NOTE_FILE = "fine-tuning.json"


@dataclass(frozen=True)
class TuningOptions:
    """How something is trained beside a model that exists.

    Attributes:
        epochs: how often it reads the corpus; a fraction is allowed.
        learning_rate: peak rate of Adam.
        batch: rows of a step.
        seed: of everything random.
    """

    epochs: float = 1.0
    learning_rate: float = 5e-4
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        kind = type(self).__name__.removesuffix("Options").lower()
        check_options(self, f"{kind} ", may_be_zero=("seed",))


@dataclass(frozen=True)
class LoraOptions(TuningOptions):
    """How a model is fine-tuned.

    Attributes:
        epochs, learning_rate, batch, seed: see :class:`TuningOptions`.
        rank: of the adapters.
        blocks: the share of the model's blocks that get adapters, counted from the last. The
            others need no gradient, which is most of the time.
        length: tokens of a row; what the model reads at once if left out. Short texts, such as
            chats, train faster in short rows.
    """

    rank: int = 8
    blocks: float = 1 / 3
    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("lora blocks", self.blocks, "a share of at most 1", lambda x: x <= 1)


@dataclass(frozen=True)
class TableOptions(TuningOptions):
    """How a table is trained: 64 rows, interpolated, from zero, with two passes."""

    learning_rate: float = 3e-3


def check_lora() -> None:
    """Raise InputError where the package that adapters need is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(
            "--lora needs the package peft, which is not installed: pip install 'prismlm[lora]'."
        )


def with_adapters(model: PreTrainedModel, options: LoraOptions) -> Any:
    """Put untrained adapters into the linear layers of a model's last blocks.

    Returns:
        The model as PEFT has it, in training mode.
    """
    from peft import LoraConfig, get_peft_model

    every = blocks(model)
    chosen = every[len(every) - max(1, round(options.blocks * len(every))) :]
    within = {module for block in chosen for module in block.modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if module in within and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    config = LoraConfig(
        r=options.rank,
        lora_alpha=ALPHA_OVER_RANK * options.rank,
        target_modules=linear,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # PEFT asks transformers by names that it gives up later; that is not a user's concern.
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
    note: dict[str, float] | None = None,
    progress: Reporter = SILENT,
) -> list[dict[str, float]]:
    """Train adapters on the documents that a corpus does not hold out; write them to ``out``."""
    rows = _rows(model, corpus, min(options.length or window, window), options.seed)
    if bf16:
        # What is not trained need not be cast again in every pass; adapters stay float32.
        model.bfloat16()
    adapted = with_adapters(model, options)
    training = Adapting(adapted, rows, options, bf16=bf16)
    training.run_all("Fine-tuning", progress)
    tokens = round(training.steps * options.batch * rows.num_tokens / len(rows))
    noted = {**(note or {}), "tokens": tokens, "steps": training.steps}
    write_adapter(training.learned, adapted, base, out, noted)
    return training.history


def write_adapter(
    learned: Iterable[nn.Parameter], adapted: Any, base: str, out: Path, note: dict[str, float]
) -> None:
    """Write trained adapters to ``out`` as PEFT does, in bfloat16, with a note beside them."""
    with room_to_write("the adapter", out.parent, WAY_OUT), atomic_directory(out) as made:
        for parameter in learned:
            parameter.data = parameter.data.bfloat16()
        # By name: where the base lay while this was trained is nobody's concern.
        adapted.peft_config["default"].base_model_name_or_path = base
        # Left to itself, PEFT asks the hub whether the vocabulary has changed.
        adapted.save_pretrained(made, save_embedding_layers=False)
        # A form to fill in, that PEFT adds.
        (made / "README.md").unlink(missing_ok=True)
        share(made)
        write_json(made / NOTE_FILE, note)


def train_table(
    model: PreTrainedModel,
    corpus: Corpus,
    options: TableOptions,
    *,
    window: int,
    bf16: bool = False,
    progress: Reporter = SILENT,
) -> None:
    """Put a table into a model, and train it alone on the documents that a corpus trains on."""
    if (earlier := uncertainty_of(model)) is not None:
        # Saved by a run that was cut off before it was measured.
        earlier.detach()
    rows = _rows(model, corpus, window, options.seed)
    model.requires_grad_(False)
    table = attach_uncertainty(model).embedding
    dtype = table.weight.dtype
    # Steps of Adam are smaller than what bfloat16 tells apart.
    table.float().requires_grad_(True)
    model.train()
    training = Adapting(model, rows, options, bf16=bf16)
    training.run_all("Training the table of uncertainty codes", progress)
    model.eval()
    table.to(dtype).requires_grad_(False)


def _rows(model: PreTrainedModel, corpus: Corpus, length: int, seed: int) -> PackedDataset:
    shared = supports_packed_documents(model)
    return pack(corpus, corpus.split("train"), length, seed, share_rows=shared)


class Adapting(Loop):
    """Adapters, or a table of uncertainty codes, with their optimizer, between two steps."""

    what = "fine-tuning"
    remedy = "give its options a lower learning_rate"

    def __init__(
        self, model: Any, rows: PackedDataset, options: TuningOptions, *, bf16: bool
    ) -> None:
        self.learned = [one for one in model.parameters() if one.requires_grad]
        steps = max(1, round(options.epochs * (len(rows) // min(options.batch, len(rows)))))
        super().__init__([{"params": self.learned, "lr": options.learning_rate}], steps)
        self._model, self._rows, self._options, self._bf16 = model, rows, options, bf16

    def run_all(self, title: str, progress: Reporter) -> None:
        """Take all steps; dropout, of models that have it, is drawn from the seed."""
        options, device = self._options, self._model.device
        rows = batches(len(self._rows), options.batch, self.steps, options.seed)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(options.seed)
            self.run(rows, title, "ce", progress)

    def losses(self, rows: np.ndarray) -> dict[str, float]:
        """Add the gradients of the rows' mean cross-entropy; return it in nats per token."""
        chosen = [self._rows[row] for row in rows.tolist()]
        count = sum(int((row["labels"] != IGNORED).sum()) for row in chosen)
        total = 0.0
        at_once = max(1, TOKENS_AT_ONCE // self._rows.length)
        for first in range(0, len(chosen), at_once):
            loss = self._summed(chosen[first : first + at_once]) / max(1, count)
            loss.backward()
            total += loss.item()
        return {"ce": total, "loss": total}

    def _summed(self, rows: list[dict[str, Tensor]]) -> Tensor:
        device = self._model.device
        given = {n: torch.stack([row[n] for row in rows]).to(device) for n in rows[0]}
        labels = given.pop("labels")[:, 1:]
        del given["token_mask"]
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
            logits = self._model(**given, use_cache=False).logits[:, :-1]
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def effect_of_table(model: PreTrainedModel, text: HeldOut, tokens: int) -> dict[str, float]:
    """Return the cross-entropy of held-out text, nats a token, by what is fed back.

    ``ce`` with the model's own codes; ``ce_without`` with none, as it was before; ``ce_shuffled``,
    the control, with its codes at other positions of a batch.
    """
    generator = torch.Generator().manual_seed(0)
    sums, count = dict.fromkeys(("ce", "ce_without", "ce_shuffled"), 0.0), 0
    with evaluating(model):
        for batch in text.batches(tokens):
            ids, attended, scored = batch.scored_on(model.device)
            given = {"input_ids": ids, "attention_mask": attended, "use_cache": False}
            output = model(**given)
            own: Tensor = output[CODES]
            others = (torch.full_like(own, NO_CODE), shuffle_codes(own, generator))
            each = [output.logits, *(model(**given, **{CODES: codes}).logits for codes in others)]
            count += int(scored.sum())
            for name, logits in zip(sums, each, strict=True):
                sums[name] += summed_cross_entropy(logits, ids, scored)
    return {name: total / count for name, total in sums.items()} | {"tokens": count}
