"""The class of a model that uncertainty feedback stands in: its own, with the codes fed."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from prismlm.errors import InputError
from prismlm.layers.uncertainty_feedback import UncertaintyEmbedding

ATTACHED = "_prismlm_feedback"
TABLE = "prismlm_uncertainty"
# Assisted generation and prompt lookup take tokens back after the model saw several at once; a
# prompt that is read in chunks has other codes than one that is read at once.
REFUSED = ("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size")


class WithUncertainty:
    """What the class of a model is mixed with while uncertainty feedback stands in it."""

    # For transformers: assisted generation is not for a model like this.
    _is_stateful = True
    _kind: type[Any]
    _feedback: type[Any]
    prismlm_uncertainty: UncertaintyEmbedding

    def reset_uncertainty(self) -> None:
        """See :meth:`UncertaintyFeedback.reset_uncertainty`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does.

        Raises:
            InputError: assisted generation, prompt lookup, a prompt in chunks, or no cache.
        """
        parent: Any = super()
        # By their names: a family's own generate may take other arguments, in another order.
        given = inspect.signature(parent.generate).bind(*args, **kwargs).arguments | kwargs
        settings = given.get("generation_config") or getattr(self, "generation_config", None)
        for name in REFUSED:
            if given.get(name, getattr(settings, name, None)) is not None:
                raise InputError(
                    f"{name} is not possible with uncertainty feedback: the codes would not be "
                    "those of one token after the other. Leave it out."
                )
        state = getattr(self, ATTACHED).state
        before, state.generates = state.generates, True
        try:
            return parent.generate(*args, **kwargs)
        finally:
            state.generates = before

    def init_continuous_batching(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse continuous batching."""
        raise InputError(
            "continuous batching with uncertainty feedback: it packs requests into one row, whose "
            "paged cache carries no codes. Use generate(), with padding on the left."
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching

    def save_pretrained(
        self,
        save_directory: Path | str,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model as it is without the table, and the table beside it.

        Readers such as vLLM's take no tensor that the architecture lacks. ``Trainer`` resumes from
        the weights alone, so that those in a directory ``checkpoint-N`` have the table as well.
        """
        model: Any = self
        tensors = dict(model.state_dict() if state_dict is None else state_dict)
        table = {name: tensors[name] for name in tensors if name.startswith(f"{TABLE}.")}
        if not Path(save_directory).name.startswith(PREFIX_CHECKPOINT_DIR):
            tensors = {name: value for name, value in tensors.items() if name not in table}
        parent: Any = super()
        parent.save_pretrained(save_directory, is_main_process, tensors, **kwargs)
        if is_main_process:
            getattr(self, ATTACHED).save(save_directory, table)

    @classmethod
    def from_pretrained(cls, directory: Path | str, *args: Any, **kwargs: Any) -> Any:
        """Open a checkpoint with its table."""
        model = cls._kind.from_pretrained(directory, *args, **kwargs)
        cls._feedback.load(directory, model)
        return model

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Its class is made at run time, so that pickle would not find it.
        return _remade, (self._kind, self._feedback), self.__dict__


def add_to(model: PreTrainedModel, feedback: object, embedding: UncertaintyEmbedding) -> None:
    """Make a table a submodule of a model, and its class one that lets ``feedback`` feed codes."""
    setattr(model, TABLE, embedding.train(model.training))
    setattr(model, ATTACHED, feedback)
    model.__class__ = _mixed(type(model), type(feedback))


def remove_from(model: Any) -> None:
    """Undo :func:`add_to`."""
    model.__class__ = model._kind
    for name in (TABLE, ATTACHED):
        delattr(model, name)


@functools.lru_cache
def _mixed(kind: type[Any], feedback: type[Any]) -> type[Any]:
    # With the signature of the model's own, by which Trainer and generate go.
    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(kind.forward, self)
        return getattr(self, ATTACHED).run(own, args, kwargs)

    own = {"_kind": kind, "_feedback": feedback, "forward": forward}
    members = {"__module__": kind.__module__, **own}
    return type(kind.__name__, (WithUncertainty, kind), members)


def _remade(kind: type[Any], feedback: type[Any]) -> Any:
    made: Any = _mixed(kind, feedback)
    return made.__new__(made)
