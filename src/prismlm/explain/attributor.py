"""Attribution without the decoder: head, lens, final norm and W, and states of another engine.

An engine such as vLLM writes the answer and hands over the hidden states of its last layer. What
``explain`` says of them needs the output layer alone, so the layers before it are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prismlm.corpus.tokenizer import tokenizer_fingerprint
from prismlm.errors import InputError, check_whole
from prismlm.explain.chain import mixer_decoder_of
from prismlm.explain.language_model import PrismLM
from prismlm.explain.prediction import Recorded
from prismlm.explain.trace import Trace
from prismlm.hub import model_directory
from prismlm.lens.layout import find_lens
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import check_embedded
from prismlm.models.output_layer import final_norm, read_output_layer
from prismlm.models.seam import output_embedding
from prismlm.models.sidecar import weight_of


@dataclass(frozen=True, repr=False)
class Attributor:
    """What of a model directory says what predictions rely on, without the decoder.

    Attributes:
        lm: the model directory, opened with a model that has no layers and cannot read.
    """

    lm: PrismLM

    @classmethod
    def load(cls, path: Path | str, *, lens: Path | str | None = None) -> Attributor:
        """Open head, lens, final norm and W of a model directory.

        The head must belong to W, and W give the logits that the lens noted at its own states. The
        layers before W are not known: states of another checkpoint with the same W pass.

        Args:
            path: a directory with ``prismlm.json`` beside a Hugging Face checkpoint, or
                ``org/name`` on the Hugging Face Hub.
            lens: the lens to use; by default the only one under ``lens/``.

        Raises:
            InputError: no such directory, no lens, several and none named, or weights that are not
                as they are used: an adapter, uncertainty feedback.
            FormatError: no head, a damaged file, or files that do not belong together.
            StaleLensError: the lens was built for other weights.
        """
        directory = model_directory(path)
        model, tokenizer, sidecar = read_output_layer(directory)
        if mixer_decoder_of(model) is not None:
            raise InputError(
                f"{directory} is a prototype mixer, whose predictions are traced through its "
                "channels: open the whole model with prismlm.load()."
            )
        lens_path = find_lens(directory, lens)
        if lens_path is None:
            raise InputError(
                f"{directory} has no lens, so there is no training text to point to. Build one "
                f"with `prismlm index {directory} --corpus DIR`."
            )
        fingerprint = tokenizer_fingerprint(tokenizer)
        opened = Lens.open(lens_path, model, sidecar.head, fingerprint, decoder=False)
        opened.tokenizer = tokenizer
        return cls(PrismLM(directory, model, tokenizer, sidecar.head, sidecar.logit_map, opened))

    @torch.no_grad()
    def attribute(
        self,
        token_ids: Sequence[int] | np.ndarray | Tensor,
        states: np.ndarray | Tensor,
        *,
        prompt: int | None = None,
        normalised: bool = True,
    ) -> Trace:
        """Return the trace of a text whose hidden states are known, as ``explain`` would.

        Args:
            token_ids: of the text, the prompt's and the answer's, [T].
            states: of the last layer after reading each token, [T, d]; that of the last token of
                an answer may be missing, since nothing was predicted from it.
            prompt: how many of the tokens are the prompt's, so that the others were written; None
                for a text that was only read.
            normalised: whether the states are those that the output embedding takes; otherwise
                the model's final norm is applied to them first, as to vLLM's.

        Raises:
            InputError: other shapes than these, tokens that the model does not have, or states that
                are not finite.
            DecompositionError: parts that do not sum to the model's logit.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64).cpu()
        if ids.ndim != 1 or not len(ids):
            raise InputError(f"token_ids has the shape {list(ids.shape)}: expected [T], T > 0.")
        check_embedded(self.lm.model, self.lm.tokenizer, ids.tolist(), self.lm.path)
        prompt = len(ids) if prompt is None else check_whole("prompt", prompt, 1, len(ids))
        count = len(ids) - (prompt < len(ids))
        weight, z = weight_of(self.lm.model), torch.as_tensor(states)
        if z.ndim != 2 or z.shape[1] != weight.shape[1] or len(z) not in (count, len(ids)):
            raise InputError(
                f"states have the shape {list(z.shape)}: expected [{len(ids)}, {weight.shape[1]}], "
                "a row for each token."
            )
        if not bool(z.isfinite().all()):
            raise InputError("the states are not finite: the engine that gave them has overflowed.")
        z = z[:count].to(weight)
        z = z if normalised else final_norm(self.lm.model)(z)
        embedded: Any = output_embedding(self.lm.model)(z)
        recorded = Recorded([z[None]], [embedded[None]], [], [ids[None, :count]])
        return self.lm.trace_of("", ids[None], prompt, recorded)
