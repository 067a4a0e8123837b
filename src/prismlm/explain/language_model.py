"""A model with its prototype head and lens, ready to be asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from prismlm.corpus.chat import ASSISTANT, Messages, question_of
from prismlm.corpus.pieces import pieces_of
from prismlm.corpus.tokenizer import tokenizer_fingerprint
from prismlm.errors import check_kind, check_path
from prismlm.explain.attention_maps import Head, heads_at, maps_of
from prismlm.explain.chain import chains_of
from prismlm.explain.following import Following, OnStep
from prismlm.explain.prediction import (
    Kept,
    OutputLayer,
    Recorded,
    record,
    split_predictions,
)
from prismlm.explain.sharing import Pushed, push
from prismlm.explain.trace import Trace
from prismlm.hub import model_directory
from prismlm.interventions.plan import applied, plan_for
from prismlm.interventions.values import Edit, Only
from prismlm.lens.layout import find_lens
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel, settings_not_applied
from prismlm.models.checkpoint import load_checkpoint
from prismlm.models.seam import output_embedding

# Rows of W that are summed to see whether it has changed.
ROWS_COMPARED = 256


@dataclass(frozen=True, repr=False)
class PrismLM(OpenedModel):
    """A Hugging Face model that can be asked what each of its predictions relies on."""

    @property
    def output_layer(self) -> OutputLayer:
        """What turns states into logits; the mean row is computed anew where weights changed."""
        embedding: Any = output_embedding(self.model)
        weight, bias = embedding.weight, getattr(embedding, "bias", None)
        now = [None if one is None else _version_of(one) for one in (weight, bias)]
        known = self._known_layers.get(0)
        if known is None or known[0] is not weight or known[1] != now:
            # Whole, in one assignment: other threads may ask meanwhile.
            known = weight, now, OutputLayer.of(self.model, self.logit_map)
            self._known_layers[0] = known
        return known[2]

    @cached_property
    def _known_layers(self) -> dict[int, tuple[Tensor, list[Any], OutputLayer]]:
        return {}

    def explain(
        self,
        text: str | Messages,
        *,
        generate: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        attention: Sequence[tuple[int, int]] = (),
        on_step: OnStep | None = None,
    ) -> Trace:
        """Split every prediction along ``text``, and along what the model writes after it.

        Entry t explains the prediction made after reading token t. Its target is the next token;
        without ``generate``, the last target is the model's top token.

        Args:
            text: at least one token, and no more than the model reads; or messages, each with
                ``role`` and ``content``, which the model's chat template makes a text of. Of a
                chat that ends with the assistant's message, that is the answer.
            generate: how many tokens to add and explain.
            temperature: 0 takes the top token; otherwise sampling from softmax(logits / T).
            seed: of the sampling.
            attention: (layer, head) of each head whose attention ``trace.attention`` is to hold,
                along all that is explained; it takes one more forward pass.
            on_step: is called with each step while the model writes, at most ten times a second
                with all that are new; where it returns False, the text ends there. Without
                ``generate`` it is not called.

        Raises:
            InputError: empty or over-long text; messages, and no chat template or one that
                refuses them; a head that the model does not have, or attention along a single
                token.
            DecompositionError: parts that do not sum to the model's logit.
        """
        prompt = self.encode(text, generate)
        check_kind("attention", attention, (list, tuple), "a list of (layer, head)")
        heads = heads_at(self.model, attention) if attention else ()
        length = prompt.shape[1]
        with record(self.model) as recorded:
            follow = on_step and Following(self, recorded, length, on_step)
            ids = self.write(prompt, generate, temperature, seed, all_logits=True, enough=follow)
        if follow is not None:
            follow.finish(ids)
            # Steps are reported some at a time, so more may have been written than was asked for.
            ids = ids[:, : follow.end]
        left_out = settings_not_applied(self.model, temperature) if generate else ""
        return self.trace_of(text, ids, length, recorded, heads=heads, settings=left_out)

    def trace_of(
        self,
        text: str | Messages,
        ids: Tensor,
        prompt_length: int,
        recorded: Recorded | Kept,
        *,
        heads: Sequence[Head] = (),
        settings: str = "",
    ) -> Trace:
        """Return the trace of a text that was read, or written after, as :meth:`explain` does.

        Args:
            text: what was asked.
            ids: its tokens and those written after it, [1, T].
            prompt_length: how many of them are its own.
            recorded: what passed the output embedding meanwhile; where that is not of these
                tokens, the model reads them once more.
            heads: that ``trace.attention`` is to hold.
            settings: what of the model's own settings was left out, in words.
        """
        wrote = ids.shape[1] > prompt_length
        count, tokens = ids.shape[1] - wrote, ids[0].tolist()
        split = split_predictions(self.model, self.head, self.output_layer, ids, count, recorded)
        maps = None
        if heads:
            labels = [piece.label for piece in pieces_of(self.tokenizer, tokens[:count])]
            maps = maps_of(self.model, ids[:, :count], labels, heads, split.codes)
        # The last token of the prompt is the one that the first written token comes after.
        asked = prompt_length if wrote else self.asked(text, ids[0])
        return Trace(
            self,
            split,
            tokens,
            prompt_length,
            range(count),
            max(0, asked - 1),
            maps,
            chains_of(self.model, self.head, ids[0, :count], split.codes),
            settings,
            question_of(text),
        )

    def asked(self, text: str | Messages, ids: Tensor) -> int:
        """Return how many of a text's tokens ``ids`` [T] come before the answer in it.

        The answer is the last message of a chat, where that is the assistant's; of other texts it
        is all.
        """
        if isinstance(text, str) or len(text) < 2 or text[-1]["role"] != ASSISTANT:
            return 0
        before = self.tokens_of(text[:-1])
        # A template may write earlier messages otherwise than one that is still to be answered.
        same = ids[: len(before)].tolist() == before
        return len(before) if same else 0

    def edit(self, *edits: Edit, only: Only | None = None) -> AbstractContextManager[None]:
        """Return a context in which the model predicts from edited states.

            with lm.edit(prismlm.Ablate(prototype=412)):
                lm.generate("Aspirin reduces")

        It holds for every forward pass of ``lm.model``, with or without a cache, in batches and
        beams, in the thread or task that entered it and in no other. Blocks nest, and edits act in
        the order they are given, the outer block's first. No edits change no bit.

        Args:
            edits: what to change.
            only: ``"prototypes"`` predicts from the (edited) mixture alone, z′ = ẑ′;
                ``"residual"`` from the residual alone, z′ = r.

        Raises:
            InputError: an unknown prototype, category or document, a clamp that nothing can hold,
                or edits that exclude one another.
        """
        return applied(self.model, plan_for(self, edits, only))

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = False,
        with_lens: bool = True,
        allow_licenses: Collection[str] = (),
        dry_run: bool = False,
    ) -> Pushed:
        """Upload the model with its lens and a card; see :func:`prismlm.explain.sharing.push`."""
        how = {"private": private, "with_lens": with_lens, "dry_run": dry_run}
        return push(self, name, allow_licenses=allow_licenses, **how)


def _version_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what tells a weight from the same one after a change.

    Changes through ``weight.data``, as of an adapter that is merged, and tensors of inference mode
    have no version, so the sum of some rows is in it.
    """
    version = None if weight.is_inference() else weight._version
    some = weight.detach()[:: max(1, len(weight) // ROWS_COMPARED)]
    return weight.data_ptr(), weight.dtype, version, float(some.cpu().double().sum())


def load(
    path: Path | str,
    *,
    lens: Path | str | None = None,
    corpus: Path | str | None = None,
    device: str = "cpu",
    revision: str | None = None,
) -> PrismLM:
    """Open a model directory with its head and lens.

    Args:
        path: a directory with ``prismlm.json`` beside a Hugging Face checkpoint, or ``org/name``
            on the Hugging Face Hub, which is fetched.
        lens: the lens to use; by default the only one under ``lens/``.
        corpus: where the lens's corpus is now, if it is no longer where it was indexed.
        device: where to run.
        revision: of a model on the hub: a branch, tag or commit.

    Raises:
        InputError: no such directory or model, several lenses and none named, or another corpus.
        FormatError: no head, a damaged file, or files that do not belong together.
        StaleLensError: the lens was built for other weights.
    """
    directory = model_directory(path, revision)
    model, tokenizer, sidecar = load_checkpoint(directory, device=device)
    lens_path, opened = find_lens(directory, lens), None
    if lens_path is not None:
        opened = Lens.open(lens_path, model, sidecar.head, tokenizer_fingerprint(tokenizer))
        opened.tokenizer = tokenizer
    lm = PrismLM(directory, model, tokenizer, sidecar.head, sidecar.logit_map, opened)
    if corpus is not None:
        lm.lens_for("corpus of one").use_corpus(check_path("the corpus", corpus))
    return lm
