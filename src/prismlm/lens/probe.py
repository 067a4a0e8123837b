"""The probe of a lens: a few indexed positions, read again to see whether this is still the model.

``probe.safetensors`` holds the token ids of 16 beginnings of documents and, at four positions of
each, the state z that the output embedding was given and the logit of the token that follows.
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
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import LogitMap, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import Hook, watch

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

PROBE_FILE = "probe.safetensors"
ROWS, SHORT, PER_ROW = 16, 16, 4
TINY = torch.finfo(torch.float32).tiny
# What rounding explains of a difference, by the median over positions and at most: some twenty
# times what was measured in float32, and three to six times that of a copy in half precision.
SINGLE, HALF = (2e-5, 2e-4), (0.05, 0.3)


@dataclass(frozen=True)
class Probe:
    """Rows of tokens, and what a model gives at four positions of each.

    The same weights pass whatever their file format, dtype, device, sharding or batch. What no
    probe sees: a change that moves states by less than rounding does, such as the last digits of a
    weight, or in half precision a matrix of 8 bits in place of 16; one that acts beyond the window
    of the index, as a longer sliding window does; one on tokens that are in none of the rows.

    Attributes:
        rows: token ids, each row the beginning of a document and the token after it: the first as
            many as a window of the index, the others at most 16.
        kind: the type that they were computed in: float32, bfloat16, tf32 and so on.
        states: z at the positions, row after row, float32 [n, d].
        logits: of the token after each position, as the model gives it, float32 [n].
    """

    rows: list[Tensor]
    kind: str
    states: Tensor
    logits: Tensor

    @classmethod
    def of(cls, model: nn.Module, corpus: Corpus, split: Split, window: int) -> Probe:
        """Read the beginnings of 15 documents spread evenly over a split, and of its longest."""
        numbers = corpus.split(split)
        # The end of a document predicts nothing of it.
        most = int(corpus.lengths[numbers].max())
        numbers = numbers[corpus.lengths[numbers] > min(SHORT, most - 1)]
        spread = numbers[np.unique(np.linspace(0, len(numbers) - 1, ROWS - 1).astype(np.int64))]
        chosen = [numbers[corpus.lengths[numbers].argmax()], *spread]
        rows: list[Tensor] = []
        for row, document in enumerate(chosen):
            length = min(1 + (SHORT if row else window), int(corpus.lengths[document]))
            tokens = corpus.read_tokens(int(corpus.starts[document]), length)
            rows.append(torch.from_numpy(tokens.astype(np.int64)))
        return cls(rows, *_read(model, rows))

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

    def check(self, model: nn.Module, directory: Path) -> None:
        """Read the rows with a model and compare: is it still the one that the lens is of?

        Raises:
            StaleLensError: rounding does not explain the difference, or the model cannot read this.
        """
        self._check_shape(model, directory, max(int(row.max()) for row in self.rows))
        off, kind = self.differences(model)
        median, most = off.median().item(), off.max().item()
        allowed = tuple(map(max, _bounds(self.kind), _bounds(kind)))
        if not (median <= allowed[0] and most <= allowed[1]):
            raise _stale(
                directory,
                f"of {len(off)} positions read again with the model, the states and logits "
                f"differ from those of the lens by {median:.2g} (median) and up to {most:.2g} of "
                f"their size, where rounding explains {allowed[0]:g} and {allowed[1]:g}. Weights, "
                "configuration, adapters or quantisation have changed",
            )

    @torch.no_grad()
    def check_output(self, model: nn.Module, directory: Path) -> None:
        """Check what needs no decoder: whether W gives the lens's logits at the lens's states.

        Raises:
            StaleLensError: rounding does not explain the difference.
        """
        following = torch.cat([row[_positions(len(row) - 1) + 1] for row in self.rows])
        self._check_shape(model, directory, int(following.max()))
        weight, bias = weight_of(model), getattr(output_embedding(model), "bias", None)
        embedded = nn.functional.linear(self.states.to(weight.dtype), weight, bias).float()
        off = self._off(LogitMap.of(model)(embedded).gather(1, following[:, None])[:, 0]).max()
        allowed = max(_bounds(self.kind)[1], _bounds(_kind(weight.dtype))[1])
        if not off <= allowed:
            raise _stale(
                directory,
                "its output layer gives other logits at the states of the lens, by up to "
                f"{off:.2g} of their size, where rounding explains {allowed:g}",
            )

    def _check_shape(self, model: nn.Module, directory: Path, largest: int) -> None:
        shape = weight_of(model).shape
        if largest >= shape[0] or self.states.shape[1] != shape[1]:
            raise _stale(
                directory, f"W is {list(shape)}, which does not fit the states of the lens"
            )

    def differences(self, model: nn.Module) -> tuple[Tensor, str]:
        """Return how far a model is from the lens at each position, [n], and its kind of numbers.

        The larger of ‖z − z′‖ / ‖z‖ and |l − l′| / max |l|, z and l from the lens, z′ and l′ from
        the model, the maximum over all positions.
        """
        kind, states, logits = _read(model, self.rows)
        moved = (states - self.states).norm(dim=1) / self.states.norm(dim=1).clamp_min(TINY)
        return torch.maximum(moved, self._off(logits)), kind

    def _off(self, logits: Tensor) -> Tensor:
        """Return |l − l′| / max |l| at each position."""
        return (logits - self.logits).abs() / self.logits.abs().max().clamp_min(TINY)


def _stale(directory: Path, why: str) -> StaleLensError:
    return StaleLensError(
        f"the lens {directory} is of another model: {why}. Put the model back as it was, or build "
        "the lens again with `prismlm index MODEL --corpus DIR --overwrite`."
    )


def _kind(dtype: torch.dtype) -> str:
    """Return the type that states were computed in; TF32 rounds the factors of float32."""
    exact = dtype.itemsize < 4 or torch.get_float32_matmul_precision() == "highest"
    return str(dtype).removeprefix("torch.") if exact else "tf32"


def _bounds(kind: str) -> tuple[float, float]:
    return SINGLE if kind in ("float32", "float64") else HALF


def _positions(length: int) -> Tensor:
    """Return four positions of a row, the last among them; fewer of a row of less."""
    parts = {max(1, length * part // PER_ROW) for part in range(1, PER_ROW + 1)}
    return torch.tensor(sorted(parts)) - 1


def _read(model: nn.Module, rows: list[Tensor]) -> tuple[str, Tensor, Tensor]:
    """Return the type, z [n, d] and the next token's logit [n] at the positions of all rows.

    The first row is read by itself, the others in one pass, padded as an index pads windows.
    """
    with evaluating(model):
        found = [_pass(model, part) for part in (rows[:1], rows[1:]) if part]
    states, logits = (torch.cat(column) for column in zip(*found, strict=True))
    return _kind(states.dtype), states.float().cpu(), logits.float()


def _pass(model: Any, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids = pad_sequence([row[:-1] for row in rows], batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) - 1 for row in rows])
    attended = torch.arange(ids.shape[1]) < lengths[:, None]
    places = [_positions(length) for length in lengths.tolist()]
    row = torch.cat([torch.full_like(place, number) for number, place in enumerate(places)])
    place = torch.cat(places)
    following = torch.cat([tokens[at + 1] for tokens, at in zip(rows, places, strict=True)])
    seen: list[Tensor] = []

    def narrow(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(args[0][row, place])
        return (seen[-1][None], *args[1:]), kwargs

    # The output embedding is handed these positions alone: a vocabulary of logits is large.
    with watch([Hook(output_embedding(model), narrow)]):
        mask = attended.to(model.device).long()
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return seen[-1], logits[0].cpu().gather(1, following[:, None])[:, 0]
