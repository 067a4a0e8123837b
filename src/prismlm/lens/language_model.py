"""A model with its prototype head and lens, ready to be asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from prismlm.corpus.tokenizer import fingerprint
from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.lens.directory import Lens
from prismlm.lens.edits import Edit, Only
from prismlm.lens.edits_plan import plan_for
from prismlm.lens.edits_scope import applied
from prismlm.lens.explain import (
    build_steps,
    decoded,
    direct_path,
    evidence_table,
    read_tokens,
    record,
)
from prismlm.lens.layout import find_lens
from prismlm.lens.trace import Trace
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import LogitMap, verify_logit_map
from prismlm.models.sidecar import Sidecar, has_sidecar, load_sidecar


@dataclass(frozen=True)
class PrismLM:
    """A Hugging Face model that can be asked what each of its predictions relies on.

    Attributes:
        path: the model directory.
        model: the plain Hugging Face model; nothing about it is changed.
        tokenizer: its tokenizer.
        head: the prototype head (``prototypes`` [K, d], ``scale`` τ, ``prototypes_per_token``).
        logit_map: what the model does after its output embedding.
        lens: contexts and sources of the prototypes, or None if no index was built.
    """

    path: Path
    model: PreTrainedModel
    tokenizer: Tokenizer
    head: PrototypeHead
    logit_map: LogitMap
    lens: Lens | None

    @property
    def context_length(self) -> int | None:
        """The most tokens the model reads, or None if it has no bound."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def explain(
        self,
        text: str,
        *,
        generate: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        attention: Sequence[tuple[int, int]] = (),
    ) -> Trace:
        """Split every prediction along ``text``, and along what the model goes on to write.

        Entry t explains the prediction made after reading token t. Its target is the next token;
        without ``generate``, the last target is the model's top token.

        Args:
            text: at least one token, and no more than the model reads.
            generate: how many tokens to add and explain.
            temperature: 0 takes the top token; otherwise sampling from softmax(logits / T).
            seed: of the sampling.
            attention: (layer, head) of each head whose attention ``trace.attention`` is to hold,
                along all that is explained; it takes one more forward pass.

        Raises:
            InputError: empty or over-long text; a head that the model does not have, or attention
                along a single token.
            DecompositionError: parts that do not sum to the model's logit.
        """
        from prismlm.lens.spectra.maps import heads_at, maps_of

        prompt = self._encode(text, generate)
        heads = heads_at(self.model, attention) if attention else ()
        with record(self.model) as recorded:
            ids = self._continue(prompt, generate, temperature, seed, all_logits=True)
        steps = ids.shape[1] - (1 if ids.shape[1] > prompt.shape[1] else 0)
        reading = read_tokens(self.model, self.head, self.logit_map, ids, steps, recorded)
        path = direct_path(self.model, self.head, ids)
        maps = None
        if heads:
            read = ids[:, :steps]
            maps = maps_of(self.model, read, decoded(self.tokenizer, read[0].tolist()), heads)
        return Trace(
            str(self.path),
            build_steps(reading, ids[0].tolist(), prompt.shape[1], self.tokenizer, self.lens, path),
            evidence_table(reading),
            self.lens,
            reading.rounding,
            maps,
        )

    def generate(
        self, text: str, *, tokens: int = 50, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """Return ``text`` with what the model writes after it; stops at the end of a document.

        Raises:
            InputError: empty text, or more tokens than the model reads.
        """
        prompt = self._encode(text, tokens)
        ids = self._continue(prompt, tokens, temperature, seed)
        added = ids[0, prompt.shape[1] :].tolist()
        return text + str(self.tokenizer.decode(added, skip_special_tokens=True))

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
            InputError: an unknown prototype, category or document, or edits that exclude one
                another. Inside the block: a clamp that is undefined at a position.
        """
        return applied(self.model, plan_for(self, edits, only))

    def _encode(self, text: str, room: int) -> Tensor:
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert isinstance(ids, Tensor)
        if ids.numel() == 0:
            raise InputError("the text is empty: give at least one token to predict from.")
        longest = self.context_length
        if longest is not None and ids.shape[1] + room > longest:
            wanted = f"{ids.shape[1]} tokens" + (f" and {room} to generate" if room else "")
            raise InputError(
                f"the text has {wanted}, and {self.path.name} reads {longest}: shorten it by "
                f"{ids.shape[1] + room - longest} tokens."
            )
        return ids.to(self.model.device)

    @torch.no_grad()
    def _continue(
        self,
        prompt: Tensor,
        tokens: int,
        temperature: float,
        seed: int,
        *,
        all_logits: bool = False,
    ) -> Tensor:
        if tokens < 0 or temperature < 0:
            raise InputError("tokens to generate and temperature must not be negative.")
        if tokens == 0:
            return prompt
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature}
        if all_logits and "logits_to_keep" in signature(self.model.forward).parameters:
            # Otherwise only the prompt's last position would pass the output embedding.
            options["logits_to_keep"] = 0
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            ids = self.model.generate(  # pyright: ignore[reportCallIssue]
                inputs=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                pad_token_id=self.tokenizer.eos_token_id,
                **options,
            )
        assert isinstance(ids, Tensor)
        return ids


class Checkpoint(NamedTuple):
    """A model directory opened without a lens: what an index is built from.

    Attributes:
        model: the plain Hugging Face model, in evaluation mode.
        tokenizer: its tokenizer.
        sidecar: its head, logit map and provenance.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    sidecar: Sidecar


def load_checkpoint(path: Path | str, *, device: str = "cpu") -> Checkpoint:
    """Open a model directory with its head, whatever state its lenses are in.

    Raises:
        InputError: no such directory.
        FormatError: no head, a damaged file, or files that do not belong together.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(
            f"{directory} is not a directory. Expected a model directory; `prismlm demo` makes one."
        )
    if not has_sidecar(directory):
        load_sidecar(directory)  # raises, saying what is missing
    model, tokenizer = read_checkpoint(directory, device=device)
    sidecar = load_sidecar(directory, model)
    verify_logit_map(model, sidecar.logit_map)
    sidecar.head.to(device)
    return Checkpoint(model, tokenizer, sidecar)


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str | None:
    """Return the fingerprint of a model's tokenizer, or None if it is not one a corpus can have."""
    fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    return fingerprint(tokenizer) if fast else None


def load(path: Path | str, *, lens: Path | str | None = None, device: str = "cpu") -> PrismLM:
    """Open a model directory with its head and lens.

    Args:
        path: a directory with ``prismlm.json`` beside a Hugging Face checkpoint.
        lens: the lens to use; by default the only one under ``lens/``.
        device: where to run.

    Raises:
        InputError: no such directory, or several lenses and none named.
        FormatError: no head, a damaged file, or files that do not belong together.
        StaleLensError: the lens was built for other weights.
    """
    directory = Path(path)
    model, tokenizer, sidecar = load_checkpoint(directory, device=device)
    found = find_lens(directory, lens)
    return PrismLM(
        path=directory,
        model=model,
        tokenizer=tokenizer,
        head=sidecar.head,
        logit_map=sidecar.logit_map,
        lens=None
        if found is None
        else Lens.open(found, model, sidecar.head, tokenizer_fingerprint(tokenizer)),
    )
