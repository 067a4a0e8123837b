"""A decoder as a classifier: a linear layer on the state of a row's last token.

Rows are ``sentence EOS`` or ``first EOS second EOS``, after a BOS where the tokenizer sets one: the
last token has seen everything, and is the same in all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.errors import DivergenceError
from prismlm.eval.glue.tasks import Task
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import uses_bf16
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import learned_positions
from prismlm.models.presets import build_model
from prismlm.models.seam import capture, output_embedding

LENGTH = 512  # tokens of a row, where no fewer positions are learned
DEVIATION = 0.02  # of the new layer's weights, that of Hugging Face's classifiers
REMEDY = "give a smaller rate by --learning-rate, or have one chosen by --search."
ROWS = 32  # read at once where nothing is trained


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, ...]], length: int
) -> tuple[list[list[int]], int]:
    """Return the tokens of rows, and how many rows were cut: the longer sentence, at its end."""
    call: Any = tokenizer
    columns = [
        call(list(column), add_special_tokens=False, verbose=False)["input_ids"]
        for column in zip(*texts, strict=True)
    ]
    begin = [tokenizer.bos_token_id] * (call("a")["input_ids"][0] == tokenizer.bos_token_id)
    end = tokenizer.eos_token_id
    end = call("\n", add_special_tokens=False)["input_ids"] if end is None else [end]
    room = length - len(begin) - len(columns) * len(end)
    rows: list[list[int]] = []
    cut = 0
    for parts in zip(*columns, strict=True):
        first, rest = len(parts[0]), sum(map(len, parts[1:]))
        cut += first + rest > room
        kept = min(first, max(room - rest, -(-room // len(parts))))
        sizes = (kept, room - kept)
        row = [
            token for part, size in zip(parts, sizes, strict=False) for token in part[:size] + end
        ]
        rows.append(begin + row)
    return rows, cut


class Classifier(nn.Module):
    """y = W z_T + b, z_T [d] the state that the decoder would predict the token after T from.

    Padding stands at the right, where no token of a causal model sees it.

    Args:
        model: a causal language model; its output embedding is left out of every pass.
        outputs: C.
    """

    def __init__(self, model: PreTrainedModel, outputs: int) -> None:
        super().__init__()
        weight: Any = output_embedding(model).weight
        self.model, self.out = model, nn.Linear(weight.shape[1], outputs)
        nn.init.normal_(self.out.weight, std=DEVIATION)
        nn.init.zeros_(self.out.bias)
        self.out.to(weight.device)
        self.bf16 = uses_bf16("auto", weight.device.type)

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return y [B, C] in float32 of rows of tokens, of any lengths."""
        device = self.out.weight.device
        sizes = torch.tensor([len(row) for row in rows])
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        mask = (torch.arange(ids.shape[1]) < sizes[:, None]).long()
        with (
            torch.autocast(device.type, torch.bfloat16, enabled=self.bf16),
            capture(self.model, logits=False) as seen,
        ):
            self.model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        last = seen.z[torch.arange(len(rows), device=device), (sizes - 1).to(device)]
        return self.out(last.float())

    def predict(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Return y [N, C] without dropout and gradients.

        Raises:
            DivergenceError: a figure is not finite.
        """
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        found = np.zeros((len(rows), self.out.out_features), np.float32)
        with evaluating(self):
            for first in range(0, len(order), ROWS):
                chosen = order[first : first + ROWS]
                found[chosen] = self([rows[row] for row in chosen]).cpu().numpy()
        if not np.isfinite(found).all():
            raise DivergenceError(f"the classifier's outputs are not finite: {REMEDY}")
        return found


class GlueModel:
    """A model directory, and its weights as they were, which every run begins with.

    Raises:
        InputError, FormatError: as :func:`prismlm.models.checkpoint.read_checkpoint`.
    """

    def __init__(self, path: Path | str, *, device: str = "cpu") -> None:
        self.name = Path(path).name
        self.model, self.tokenizer = read_checkpoint(path, device=device)
        self.model.float()
        self.identity = fingerprints.of_weights(self.model)
        self.length = min(LENGTH, learned_positions(self.model) or LENGTH)
        self._weights = {k: v.to("cpu", copy=True) for k, v in self.model.state_dict().items()}

    def classifier(self, task: Task, seed: int, *, from_scratch: bool = False) -> Classifier:
        """Return the model under a new layer, with its own weights or new ones."""
        torch.manual_seed(seed)
        if from_scratch:
            fresh = build_model(self.model.config).to(self.model.device)  # pyright: ignore
            return Classifier(fresh.float(), task.outputs)
        self.model.load_state_dict(self._weights)
        return Classifier(self.model, task.outputs)
