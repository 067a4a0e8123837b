"""The probe of a lens: indexed positions that are read again to check that the model is the same.

``probe.safetensors`` has the token ids of the starts of 16 documents and, at four positions of
each, the state z before the output embedding and the logit of the next token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from prismlm.errors import StaleLensError
from prismlm.lens.layout import REBUILD
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

PROBE_FILE = "probe.safetensors"
ROWS, SHORT, PER_ROW = 16, 16, 4
TINY = torch.finfo(torch.float32).tiny
# Bounds of the median and the largest relative difference that rounding explains: some twenty times
# the measured ones in float32, and three to six times those of a copy in half precision.
SINGLE, HALF = (2e-5, 2e-4), (0.05, 0.3)


@dataclass(frozen=True)
class Probe:
    """Rows of tokens, with a model's states and logits at four positions of each.

    The same weights pass in any file format, dtype, device, sharding or batch. A probe does not
    detect changes smaller than rounding, such as 8-bit weights under half precision; changes beyond
    the window of the index, such as a longer sliding window; changes on tokens in none of the rows.
    """

    rows: list[Tensor]  # a window of the index and one token more, then rows of at most 17 tokens
    kind: str  # the number format of the computation: float32, bfloat16, tf32 and so on
    states: Tensor  # z at the positions, row after row, float32 [n, d]
    logits: Tensor  # of the token after each position, float32 [n]

    @classmethod
    def measure(cls, model: nn.Module, corpus: Corpus, split: Split, window: int) -> Probe:
        """Read the starts of 15 documents spread evenly over a split, and of its longest one."""
        numbers = corpus.split(split)
        # The last token of a document predicts nothing.
        most = int(corpus.lengths[numbers].max())
        numbers = numbers[corpus.lengths[numbers] > min(SHORT, most - 1)]
        spread = numbers[np.unique(np.linspace(0, len(numbers) - 1, ROWS - 1).astype(np.int64))]
        documents = [numbers[corpus.lengths[numbers].argmax()], *spread]
        rows: list[Tensor] = []
        for row, document in enumerate(documents):
            length = min(1 + (SHORT if row else window), int(corpus.lengths[document]))
            tokens = corpus.read_tokens(int(corpus.starts[document]), length)
            rows.append(torch.from_numpy(tokens.astype(np.int64)))
        return cls(rows, *_measured(model, rows))

    def save(self, directory: Path) -> None:
        """Write ``probe.safetensors``."""
        tensors = {
            "tokens": torch.cat(self.rows),
            "lengths": torch.tensor([len(row) for row in self.rows]),
            "states": self.states.contiguous(),
            "logits": self.logits.contiguous(),
        }
        save_file(tensors, str(directory / PROBE_FILE), metadata={"kind": self.kind})

    @classmethod
    def open(cls, directory: Path) -> Probe:
        """Read ``probe.safetensors``."""
        with safe_open(str(directory / PROBE_FILE), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            rows = list(tensors["tokens"].split(tensors["lengths"].tolist()))
            return cls(rows, file.metadata()["kind"], tensors["states"], tensors["logits"])

    def check(self, model: nn.Module, lens: Path | str, *, decoder: bool = True) -> None:
        """Raise StaleLensError if a model differs on these rows by more than rounding.

        Without a ``decoder``, only its output layer is compared, at the states of the lens.
        """
        shape, largest = weight_of(model).shape, max(int(row.max()) for row in self.rows)
        why = f"W is {list(shape)}, which does not fit the states of the lens"
        if largest < shape[0] and self.states.shape[1] == shape[1]:
            difference, kind = self.differences(model, decoder=decoder)
            median, most = difference.median().item(), difference.max().item()
            allowed = SINGLE if {self.kind, kind} <= {"float32", "float64"} else HALF
            if median <= allowed[0] and most <= allowed[1]:
                return
            what = "its states and logits" if decoder else "the logits of its output layer"
            why = (
                f"at {len(difference)} positions, {what} differ from those of the lens by "
                f"{median:.2g} (median) and up to {most:.2g} of their size, more than the "
                f"{allowed[0]:g} and {allowed[1]:g} that rounding explains. Weights, "
                "configuration, adapters or quantisation have changed"
            )
        raise StaleLensError(
            f"the lens {lens} is of another model: {why}. Put it back as it was. {REBUILD}"
        )

    def differences(self, model: nn.Module, *, decoder: bool = True) -> tuple[Tensor, str]:
        """Return the difference at each position, [n], and the number format of the model.

        It is the larger of ‖z − z′‖ / ‖z‖ and |l − l′| / max |l|, with z and l of the lens, z′ and
        l′ of the model, and the maximum over all positions; z′ is z without a ``decoder``.
        """
        kind, states, logits = _measured(model, self.rows, None if decoder else self.states)
        moved = (states - self.states).norm(dim=1) / self.states.norm(dim=1).clamp_min(TINY)
        size = self.logits.abs().max().clamp_min(TINY)
        return torch.maximum(moved, (logits - self.logits).abs() / size), kind


@torch.no_grad()
def _measured(
    model: nn.Module, rows: list[Tensor], states: Tensor | None = None
) -> tuple[str, Tensor, Tensor]:
    """Return number format, states [n, d], and logits of the tokens after them [n], float32.

    The states are those of the model, unless some are given.
    """
    weight, bias = weight_of(model), getattr(output_embedding(model), "bias", None)
    z = _read(model, rows) if states is None else states.to(weight)
    embedded = nn.functional.linear(z.to(weight), weight, bias).float().cpu()
    following = torch.cat([row[_positions(len(row) - 1) + 1] for row in rows])
    logits = LogitMap.of(model)(embedded).gather(1, following[:, None])[:, 0]
    # TF32 rounds the factors of float32.
    exact = z.dtype.itemsize < 4 or torch.get_float32_matmul_precision() == "highest"
    return str(z.dtype).removeprefix("torch.") if exact else "tf32", z.float().cpu(), logits


def _positions(length: int) -> Tensor:
    """Return up to four positions of a row, the last among them."""
    parts = {max(1, length * part // PER_ROW) for part in range(1, PER_ROW + 1)}
    return torch.tensor(sorted(parts)) - 1


def _read(model: Any, rows: list[Tensor]) -> Tensor:
    """Return z at all positions, [n, d]."""
    states: list[Tensor] = []
    # The long row by itself, the others padded in one pass.
    for part in filter(None, (rows[:1], rows[1:])):
        ids = pad_sequence([row[:-1] for row in part], batch_first=True)
        lengths = torch.tensor([len(row) - 1 for row in part])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.long().to(model.device)}
        with evaluating(model), capture(model, logits=False) as captured:
            model(**inputs, use_cache=False)
        states += [z[_positions(n)] for z, n in zip(captured.z, lengths.tolist(), strict=True)]
    return torch.cat(states)
