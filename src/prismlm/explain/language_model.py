"""A model with its prototype head and lens: explained, streamed, or without its decoder.

An engine such as vLLM writes an answer and hands over the hidden states of its last layer. What
``explain`` says of them needs the output layer alone, so :class:`Attributor` opens no other layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus.chat import Messages, asked_in, question_of
from prismlm.corpus.tokenizer import tokenizer_fingerprint
from prismlm.errors import InputError, check_path, check_whole
from prismlm.explain.chain import mixer_decoder_of, read_direct_path
from prismlm.explain.prediction import OutputLayer, Predictions, split_predictions, split_states
from prismlm.explain.sharing import push
from prismlm.explain.trace import Trace
from prismlm.hub import model_directory
from prismlm.interventions.plan import applied, plan_for
from prismlm.interventions.values import Edit, Only
from prismlm.lens.layout import find_lens
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel, check_embedded, settings_not_applied
from prismlm.models.checkpoint import final_norm, load_checkpoint, read_output_layer
from prismlm.models.device import Placement, device_named
from prismlm.models.seam import output_embedding
from prismlm.models.sidecar import Sidecar, weight_of
from prismlm.models.uncertainty_feedback import recording_codes

ROWS_COMPARED = 256  # of the output weights, whose sum tells whether they have changed


@dataclass(frozen=True, repr=False)
class PrismLM(OpenedModel):
    """A Hugging Face model that can be asked what each of its predictions relies on."""

    @property
    def output_layer(self) -> OutputLayer:
        """The map from states to logits, computed anew where its weights were changed.

        It holds a float32 copy of half-precision weights.
        """
        found = [_version(weight) for weight in output_embedding(self.model).parameters()]
        before, layer = vars(self).get("_output_layer", (None, None))
        if before != found:
            layer = OutputLayer.from_model(self.model, self.logit_map)
            vars(self)["_output_layer"] = found, layer
        return layer

    def explain(
        self,
        text: str | Messages,
        *,
        generate: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        on_text: Callable[[str], object] | None = None,
    ) -> Trace:
        """Split every prediction along ``text``, and along what the model writes after it.

        Entry t explains the prediction made after reading token t. Its target is the next token;
        without ``generate``, the last target is the model's top token.

        Args:
            text: a text of at least one token, or messages, each with ``role`` and ``content``, for
                the model's chat template. If the last message is the assistant's, it is the answer.
            generate: the number of tokens to add and explain.
            temperature: 0 takes the top token; otherwise sampling from softmax(logits / T).
            seed: of the sampling.
            on_text: called with each new piece of generated text, in whole characters.

        Raises:
            InputError: empty or over-long text; messages without a chat template or refused by it.
            DecompositionError: the parts do not sum to the model's logit.
        """
        prompt = self.encode(text, generate)
        length = prompt.shape[1]
        with recording_codes(self.model) as codes:
            ids = self.write(prompt, generate, temperature, seed, on_text=on_text)
        not_applied = settings_not_applied(self.model, temperature) if generate else ""
        count = ids.shape[1] - (ids.shape[1] > length)
        split = split_predictions(self.model, self.head, self.output_layer, ids, count, codes)
        return self.trace_of(text, ids, length, split, settings=not_applied)

    def trace_of(
        self,
        text: str | Messages,
        ids: Tensor,
        prompt_length: int,
        split: Predictions,
        *,
        settings: str = "",
    ) -> Trace:
        """Return the trace of the split predictions along prompt and answer ``ids`` [1, T].

        ``settings`` is a note on generation settings that were not applied.
        """
        generated = ids.shape[1] > prompt_length
        count, path = len(split), None
        # Fitted weights depend on other prototypes, so they are no sums over channels.
        if self.head.weights == "cosine" and mixer_decoder_of(self.model) is not None:
            path = read_direct_path(self.model, self.head, ids[0, :count], split.codes)
        # The first written token is predicted after the last token of the prompt.
        start = prompt_length if generated else self.answer_start(text, ids[0])
        return Trace(
            self,
            split,
            ids[0].tolist(),
            prompt_length,
            range(count),
            first=max(0, start - 1),
            path=path,
            settings=settings,
            question=question_of(text),
            asked=asked_in(text),
        )

    def edit(self, *edits: Edit, only: Only | None = None) -> AbstractContextManager[None]:
        """Return a context in which the model predicts from edited states.

            with lm.edit(prismlm.Ablate(prototype=412)):
                lm.generate("Aspirin reduces")

        It applies to every forward pass of ``lm.model`` in the thread or task that entered it.
        Blocks nest, and edits act in order, those of the outer block first. ``only="prototypes"``
        predicts from the (edited) mixture alone, z′ = ẑ′; ``only="residual"`` from the residual
        alone, z′ = r.
        """
        return applied(self.model, plan_for(self, edits, only))

    push_to_hub = push


def _version(weight: Tensor) -> tuple[Any, ...]:
    """Return what differs once a weight has changed."""
    version = None if weight.is_inference() else weight._version
    # A change through ``weight.data``, as of a merged adapter, leaves the version as it was.
    rows = weight.detach()[:: max(1, len(weight) // ROWS_COMPARED)]
    return weight.data_ptr(), weight.dtype, version, float(rows.cpu().double().sum())


def load(
    path: Path | str,
    *,
    lens: Path | str | None = None,
    corpus: Path | str | None = None,
    device: Placement = "cpu",
    revision: str | None = None,
) -> PrismLM:
    """Open a model directory with its head and lens.

    Args:
        path: a directory with ``prismlm.json`` in a Hugging Face checkpoint, or ``org/name`` on the
            Hugging Face Hub.
        lens: the lens to use; by default the only one under ``lens/``.
        corpus: where the lens's corpus is now, if it has moved since it was indexed.
        device: where to run: cpu, cuda, cuda:1, auto for a GPU if there is one, balanced to spread
            the model over all GPUs, CPU memory and disk, or accelerate's ``device_map``: a dict.
        revision: of a model on the hub: a branch, tag or commit.

    Raises:
        InputError: no such directory or model, several lenses and none chosen, or another corpus.
        FormatError: no head, a damaged file, or files that do not belong together.
        StaleLensError: the lens was built for other weights.
    """
    directory = model_directory(path, revision)
    device = device_named(device) if isinstance(device, str) else device
    model, tokenizer, sidecar = load_checkpoint(directory, device=device)
    lm = _with_lens(directory, model, tokenizer, sidecar, lens)
    if corpus is not None:
        lm.lens_for("corpus of one").use_corpus(check_path("the corpus", corpus))
    return lm


def _with_lens(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sidecar: Sidecar,
    lens: Path | str | None,
    *,
    decoder: bool = True,
) -> PrismLM:
    path, opened = find_lens(directory, lens), None
    if path is not None:
        fingerprint = tokenizer_fingerprint(tokenizer)
        opened = Lens.open(path, model, sidecar.head, fingerprint, decoder=decoder)
        opened.tokenizer = tokenizer
    return PrismLM(directory, model, tokenizer, sidecar.head, sidecar.logit_map, opened)


@dataclass(frozen=True, repr=False)
class Attributor:
    """Head, lens, final norm and W of a model directory, for states of another engine."""

    lm: PrismLM  # the model directory, opened with a model that has no layers and cannot read

    @classmethod
    def load(cls, path: Path | str, *, lens: Path | str | None = None) -> Attributor:
        """Open head, lens, final norm and W of a model directory.

        The head must belong to W, and W must give the logits that the lens stored for its states.
        Earlier layers are not checked: states of another checkpoint with the same W pass.

        Paths and errors are those of :func:`load`; a lens is required, and adapters, uncertainty
        feedback and prototype mixers are refused.
        """
        directory = model_directory(path)
        model, tokenizer, sidecar = read_output_layer(directory)
        if mixer_decoder_of(model) is not None:
            raise InputError(
                f"{directory} is a prototype mixer, whose predictions are traced through its "
                "channels: open the whole model with prismlm.load()."
            )
        lm = _with_lens(directory, model, tokenizer, sidecar, lens, decoder=False)
        lm.lens_for("training text to point to")
        return cls(lm)

    @torch.no_grad()
    def attribute(
        self,
        token_ids: Sequence[int] | np.ndarray | Tensor,
        states: np.ndarray | Tensor,
        *,
        prompt: int | None = None,
        question: str = "",
        normalised: bool = True,
    ) -> Trace:
        """Return the trace of a text from its hidden states, as ``explain`` would.

        Args:
            token_ids: of prompt and answer, [T].
            states: of the last layer after each token, [T, d]; that of an answer's last token may
                be missing.
            prompt: the number of prompt tokens; None for a text that was only read.
            question: what the user of a chat says, for its support.
            normalised: whether the states are inputs of the output embedding; otherwise the model's
                final norm is applied to them first, as to vLLM's.

        Raises:
            InputError: other shapes, or unknown tokens.
            DecompositionError: the parts do not sum to the logit, as where states are not finite.
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
        z = z[:count].to(weight)
        z = z if normalised else final_norm(self.lm.model)(z)
        raw: Any = output_embedding(self.lm.model)(z)
        output, head = self.lm.output_layer, self.lm.head
        targets = output.targets(ids, raw)
        split = split_states(output, head, z, ids[:count], targets, raw_logits=raw)
        return replace(self.lm.trace_of("", ids[None], prompt, split), asked=question)
