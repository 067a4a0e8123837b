"""The entropy of a model's last prediction, added to its next input by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from prismlm.errors import InputError, check_whole
from prismlm.layers.uncertainty_feedback import UncertaintyEmbedding
from prismlm.models.uncertainty_feedback.call import (
    CACHES,
    CODES,
    Call,
    Forward,
    checked_codes,
    codes_fed_back,
    codes_that_occur,
    first_pass_codes,
    logits_of_last,
    read_call,
)
from prismlm.models.uncertainty_feedback.place import (
    check_causal,
    check_model,
    decoder_and_embeddings,
    width_of,
)
from prismlm.models.uncertainty_feedback.state import (
    Earlier,
    State,
    Threads,
    carry,
    check_cache_kind,
    codes_of,
    copied,
    go_on,
    has_seen,
    length_of,
)
from prismlm.models.watch import unwatched
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes, neutral_code

ATTACHED = "_prismlm_uncertainty"
# What the pass that codes are taken from is to leave out.
NOT_IN_FIRST_PASS = ("labels", "logits_to_keep", "output_hidden_states", "output_attentions")


class UncertaintyFeedback(nn.Module):
    """Adds to the input at position t a vector for the entropy of the prediction made at t − 1.

        x_t ← x_t + E[c_t],   c_t = ⌊(levels − 1) H(softmax ℓ_{t−1}) / ln V⌋

    c of a row's first token and of padding is none, and adds nothing. The model, its weights and
    its code stay as they are; hooks stand at its input embeddings until :meth:`detach`.

    A call with one new token and a cache has its code from the cache. Of several new tokens the
    first has the cache's; the others have the neutral code with ``passes`` = 1, and with more the
    codes of as many less one passes without gradient, each of which makes about one more position
    what token by token would give. Codes follow the rows of a cache: beams, selection, repetition.
    ``uncertainty_codes`` of a call, int64 [B, T], replay codes; −1 is none. The output has those
    that were used, under the same name.

    Without a cache a call knows nothing of the ones before it, but in ``generate`` and
    :meth:`continuing`. Threads know nothing of each other's calls.

    Source: PRISMA, with the meaning that its pseudo-code loses in cached decoding.

    Attributes:
        embedding: the table.
        passes: as given.
        places: the names that were given, of ``decoder`` and ``embeddings``.
        seen: bool [levels], which codes were fed to the model while it trained.
        rearrange: what is done with the codes of a call while the model trains, replayed ones left
            alone; None for nothing. Controls put the signal out of order with it.

    Args:
        model: a Hugging Face decoder, or encoder-decoder.
        embedding: the table.
        passes: forward passes of a call with several new tokens, at least 1.
        decoder: dotted name of the decoder, for a model that does not say.
        embeddings: dotted name of its input embeddings, likewise.

    Raises:
        InputError: a model that predicts no next token or whose decoder or input embeddings are
            not found, one that has feedback already, a table of another width, or no pass.
    """

    seen: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        embedding: UncertaintyEmbedding,
        *,
        passes: int = 1,
        decoder: str | None = None,
        embeddings: str | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        self.embedding = embedding
        self.passes = check_whole("the number of passes", passes, 1)
        self.rearrange: Callable[[Tensor], Tensor] | None = None
        # Modules look up what they hold by a slower way, which a decoding step would feel.
        self._levels = embedding.levels
        self.places = {"decoder": decoder, "embeddings": embeddings}
        inner, inputs = decoder_and_embeddings(model, **self.places)
        # In a tuple, so that the model's parameters are not this module's.
        self._model = (model,)
        if uncertainty_of(model) is not None:
            raise InputError(
                f"this {type(model).__name__} has uncertainty feedback already: detach() that "
                "first."
            )
        check_causal(model)
        width = width_of(inputs)
        if embedding.weight.shape[1] != width:
            raise InputError(
                f"the table has vectors of {embedding.weight.shape[1]}, and the input embeddings "
                f"of {type(model).__name__} are {width} wide."
            )
        seen = torch.zeros(embedding.levels, dtype=torch.bool, device=embedding.weight.device)
        self.register_buffer("seen", seen)
        # Looked up in every call it would take longer than the sums of a decoding step.
        self._forward = Forward.of(model)
        self._threads = Threads()
        self._was_stateful = bool(model._is_stateful)
        # Assisted generation takes tokens back after several at once were looked at.
        model._is_stateful = True
        # Not models.watch: these stand until detach(), and act for every thread.
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
            inner.register_forward_pre_hook(self._enter, with_kwargs=True),
            inputs.register_forward_hook(self._embedded),
        ]
        # Past nn.Module, which would make it a part of the model and of its checkpoints.
        object.__setattr__(model, ATTACHED, self)
        self._generated_by = vars(model).get("generate")
        object.__setattr__(model, "generate", self._generate)

    @property
    def model(self) -> PreTrainedModel:
        """The model that the hooks stand in."""
        return self._model[0]

    @property
    def _state(self) -> State:
        return self._threads.state

    def reset_uncertainty(self) -> None:
        """Forget the codes of the last call that had no cache, in :meth:`continuing`."""
        self._state.earlier = None

    @contextmanager
    def continuing(self) -> Iterator[None]:
        """Let rows without a cache go on from those of the call before, in this block and thread.

        A row that begins with the tokens of a row of the last call without a cache, and has its
        source or images, goes on with its codes; the batch may change its size. The first call
        begins anew. Calls with ``uncertainty_codes`` have no part in it, and one in training mode
        ends what was begun. ``generate`` is such a block.
        """
        state = self._state
        held = state.goes_on, state.earlier
        state.goes_on, state.earlier = True, None
        try:
            yield
        finally:
            state.goes_on, state.earlier = held

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does."""
        with self.continuing():
            if self._generated_by is not None:
                return self._generated_by(*args, **kwargs)
            kind: Any = type(self.model)
            return kind.generate(self.model, *args, **kwargs)

    def detach(self) -> None:
        """Take the hooks down; the model is what it was. A second time does nothing."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.model._is_stateful = self._was_stateful
        object.__delattr__(self.model, ATTACHED)
        object.__delattr__(self.model, "generate")
        if self._generated_by is not None:
            object.__setattr__(self.model, "generate", self._generated_by)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = dict(self._forward.named(args, kwargs))
        replayed = kwargs.pop(CODES, None)
        state = self._state
        # A call that was interrupted may have left something.
        state.end_call()
        call = state.call = read_call(module, self._forward, kwargs)
        if module.training:
            # What rows of other weights were fed says nothing of these.
            state.earlier = None
        if replayed is not None:
            state.replayed, state.codes = True, checked_codes(replayed, call, self._levels)
            return (), kwargs
        codes, settled = self._first_codes(call)
        if self.passes > 1 and call.ids.shape[1] > 1:
            for _ in range(self.passes - 1):
                predicted = self._predicted(codes, kwargs)
                codes = codes_fed_back(codes, predicted, settled)
        if module.training and self.rearrange is not None:
            codes = self.rearrange(codes)
        state.codes = codes
        return (), kwargs

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._state.end_call()

    def _first_codes(self, call: Call) -> tuple[Int64[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
        """Return codes to begin with, and which of them are to stay, if an earlier call had any."""
        levels, rows = self._levels, len(call.ids)
        held = None if call.cache is None else codes_of(call.cache)
        if held is not None:
            held.check(rows, levels, length_of(call.cache))
            start = held.following
        elif call.cache is not None and has_seen(call.cache):
            start = call.ids.new_full((rows, 1), neutral_code(levels))
        else:
            start = call.ids.new_full((rows, 1), NO_CODE)
        codes = first_pass_codes(call, start, neutral_code(levels))
        earlier = self._state.earlier
        if call.cache is not None or earlier is None:
            return codes, None
        return go_on(call, codes, earlier)

    @torch.no_grad()
    def _predicted(
        self, codes: Int64[Tensor, "B T"], kwargs: dict[str, Any]
    ) -> Int64[Tensor, "B T"]:
        """Return the code of the prediction at each new position, given codes at all of them."""
        own = {name: value for name, value in kwargs.items() if name not in NOT_IN_FIRST_PASS}
        held = [name for name in CACHES if own.get(name) is not None]
        for name in held:
            # A pass that only looks must leave the cache alone.
            own[name] = copied(own[name])
        own |= {"use_cache": bool(held), "return_dict": True}
        self._state.codes = codes
        # Past the model's own hooks, which would begin this call, or shard it, a second time.
        forward: Any = self.model.forward
        with unwatched():
            logits: Tensor = forward(**own).logits
        return entropy_codes(logits, self._levels)

    def _enter(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._state.codes is None:
            return None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            self._state.pending = True
            return None
        return args, kwargs | {"inputs_embeds": embeds + self._vectors(embeds)}

    def _embedded(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        if not self._state.pending:
            return None
        self._state.pending = False
        return output + self._vectors(output)

    def _vectors(self, beside: Tensor) -> Tensor:
        codes = self._state.codes
        assert codes is not None
        embedding = self.embedding
        vectors = embedding(codes.to(embedding.weight.device)).to(beside)
        if vectors.shape != beside.shape:
            raise InputError(
                f"the vectors of the codes are {list(vectors.shape)}, and what comes from the "
                f"input embeddings is {list(beside.shape)}: name others, with "
                'attach_uncertainty(model, decoder="…", embeddings="…").'
            )
        self._state.added = True
        return vectors

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        state = self._state
        codes, call = state.codes, state.call
        assert codes is not None
        assert call is not None
        if not state.added:
            raise InputError(
                f"nothing was added to the input of this {type(module).__name__}: its input "
                "embeddings were not called within its decoder, nor was the decoder given "
                'inputs_embeds. Name others, with attach_uncertainty(model, decoder="…", '
                'embeddings="…"), or detach() this.'
            )
        if isinstance(output, tuple):
            raise InputError(
                "return_dict=False gives no names to what a model returns: leave it out with "
                "uncertainty feedback."
            )
        output[CODES] = codes
        # Some models write into the cache that they were given and do not return it.
        cache = next((output[name] for name in CACHES if output.get(name) is not None), call.cache)
        check_cache_kind(module, output)
        if module.training:
            self.seen |= codes_that_occur(codes, self._levels).to(self.seen.device)
        if cache is None and (module.training or not output.logits.shape[1]):
            state.earlier = None
            return output
        row = logits_of_last(output.logits, call)
        if row is None and cache is None and (state.replayed or not state.goes_on):
            return output
        place = call.ids.shape[1] - 1
        if row is None:
            raise InputError(
                f"the logits of this call are {list(output.logits.shape)} and have none of the "
                f"last position, {place}, whose entropy is the code of the next token: have it "
                "among logits_to_keep, or set use_cache=False."
            )
        following = entropy_codes(row, self._levels, first_position=place)
        if not call.plain:
            following = torch.where(call.text[:, -1:], following, NO_CODE)
        if cache is not None:
            carry(cache, codes, following, self._levels)
        elif state.goes_on and not state.replayed:
            state.earlier = Earlier(call, torch.cat([codes, following], 1))
        return output


def uncertainty_of(model: nn.Module) -> UncertaintyFeedback | None:
    """Return the feedback that stands in a model, or None."""
    return getattr(model, ATTACHED, None)
