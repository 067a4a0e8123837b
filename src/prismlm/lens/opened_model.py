"""An opened model directory: the model with its head and lens, tokenizing and generating text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from prismlm.corpus.chat import ASSISTANT, Messages, chat_text, encode_chat, is_messages
from prismlm.corpus.encode import encode_text
from prismlm.corpus.pieces import BROKEN
from prismlm.errors import InputError, check_number, check_text, check_whole, no_panics, shown
from prismlm.layers import PrototypeHead
from prismlm.lens.lens import Lens
from prismlm.models.seam import LogitMap
from prismlm.models.watch import evaluating

MAX_SEED, MAX_NEW_TOKENS = 2**63 - 1, 2**31 - 1
_drawing = threading.RLock()
# Logits divided by a smaller temperature overflow float32.
MIN_TEMPERATURE = 1e-6
# Settings of a model's generation_config.json that a call sets itself or that change no token;
# those that act on sampling only; and values without effect, besides None, False and 0.
SET_BY_CALL = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "bos_token_id", "eos_token_id",
    "pad_token_id", "decoder_start_token_id", "use_cache", "output_attentions", "output_logits",
    "output_hidden_states", "output_scores", "return_dict_in_generate",
}  # fmt: skip
SAMPLING = {"top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "length_penalty": 1,
    "encoder_repetition_penalty": 1, "top_p": 1, "typical_p": 1,
}  # fmt: skip


class TooLongError(InputError):
    """A text that does not fit what reads it."""


@dataclass(frozen=True, repr=False)
class OpenedModel:
    """A Hugging Face model with its prototype head and lens.

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
    tokenizer: PreTrainedTokenizerBase
    head: PrototypeHead
    logit_map: LogitMap
    lens: Lens | None

    def __repr__(self) -> str:
        lens = "none" if self.lens is None else f"{self.lens.name}, {self.lens.meta.size()}"
        head = f"{self.head.num_prototypes:,} prototypes, {self.head.prototypes_per_token} a token"
        return f"{type(self).__name__} {self.path}: {head}; lens: {lens}"

    def lens_for(self, what: str) -> Lens:
        """Return the lens; InputError, naming what is missing, if there is none."""
        if self.lens is None:
            raise InputError(
                f"{self.path} has no lens, so there is no {what}. Build one with `prismlm index "
                f"{self.path} --corpus DIR`."
            )
        return self.lens

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model reads, None if unlimited."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def generate(
        self,
        text: str | Messages,
        *,
        tokens: int = 50,
        temperature: float = 0.0,
        seed: int = 0,
        on_text: Callable[[str], object] | None = None,
    ) -> str:
        """Return ``text`` with its continuation, or the answer to messages.

        At most ``tokens`` are generated, with temperature and seed as of :meth:`PrismLM.explain`.
        ``on_text`` is called with each new piece of text, in whole characters.
        """
        prompt = self.encode(text, tokens)
        ids = self.write(prompt, tokens, temperature, seed, on_text=on_text)
        words = self.words(ids[0, prompt.shape[1] :])
        return text + words if isinstance(text, str) else words

    def words(self, ids: Tensor | Sequence[int]) -> str:
        """Decode tokens [T] without special ones."""
        listed = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        return str(self.tokenizer.decode(listed, skip_special_tokens=True))

    def as_text(self, text: str | Messages, room: int = 0) -> str:
        """Return a text unchanged, or messages in the model's chat template.

        ``room`` is how many tokens are to be generated after it.
        """
        if is_messages(text):
            return chat_text(self.tokenizer, cast("Messages", text), continue_final=room > 0)
        return check_text("the text", text)

    def tokens_of(self, text: str | Messages, room: int = 0) -> list[int]:
        """Tokenize a text or messages; InputError if they are empty or unsuitable."""
        with no_panics():
            if is_messages(text):
                ids = encode_chat(self.tokenizer, cast("Messages", text), continue_final=room > 0)
            else:
                ids = encode_text(self.tokenizer, self.as_text(text))
        if len(ids) == len(encode_text(self.tokenizer, "")):
            raise InputError("the text is empty: give at least one token to predict from.")
        check_embedded(self.model, self.tokenizer, ids, self.path)
        return ids

    def answer_start(self, text: str | Messages, ids: Tensor) -> int:
        """Return how many of ``ids`` [T] precede the assistant's last message; 0 in a text."""
        if isinstance(text, str) or len(text) < 2 or text[-1]["role"] != ASSISTANT:
            return 0
        # The whole chat was read, perhaps in windows, so that its beginning has no limit.
        before = encode_chat(self.tokenizer, text[:-1])
        # A template may write earlier messages differently if the last one is not answered yet.
        return len(before) if ids[: len(before)].tolist() == before else 0

    def encode(
        self,
        text: str | Messages,
        room: int = 0,
        *,
        limit: int | None = None,
        reader: str | None = None,
    ) -> Tensor:
        """Return :meth:`tokens_of`, [1, T]; TooLongError unless ``room`` more fit the context.

        A ``reader``, by default the model, may have a ``limit`` below the model's own.
        """
        room = check_whole("the number of tokens to generate", room, most=MAX_NEW_TOKENS)
        longest = self.context_length
        if limit is None or (longest is not None and longest < limit):
            limit, reader = longest, None
        ids = torch.tensor([self.tokens_of(text, room)])
        length = ids.shape[1]
        if limit is not None and length + room > limit:
            left = limit - length
            advice = (
                f"shorten it by {room - left} tokens" if left < 1 else f"generate at most {left}"
            )
            raise TooLongError(
                f"the text has {length} tokens{f' and {room} to generate' if room else ''}, and "
                f"{reader or self.path.name} reads {limit}: {advice}."
            )
        return ids.to(self.model.device)

    def write(
        self,
        prompt: Tensor,
        tokens: int,
        temperature: float,
        seed: int,
        *,
        on_text: Callable[[str], object] | None = None,
        **options: Any,
    ) -> Tensor:
        """Return ``prompt`` with its continuation, as :func:`write_after`.

        ``on_text`` is called with each new piece of text, in whole characters.
        """
        written = ""

        def stream(ids: Tensor, *, last: bool = False) -> bool:
            nonlocal written
            words = self.words(ids[0, prompt.shape[1] :])
            if on_text and (last or (words.startswith(written) and not words.endswith(BROKEN))):
                on_text(words[len(written) :])
                written = words
            return False

        if on_text:
            options["enough"] = stream
        ids = write_after(self.model, self.tokenizer, prompt, tokens, temperature, seed, **options)
        if tokens:
            stream(ids, last=True)
        return ids


class _OwnSettings(GenerationConfig):
    """Settings that ``generate`` does not fill in from the model's generation_config.json.

    It does so by an update that allows custom entries.
    """

    def update(
        self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        return {} if allow_custom_entries else super().update(defaults_only=defaults_only, **kwargs)


def settings_not_applied(model: PreTrainedModel, temperature: float) -> str:
    """Name the settings of a model's generation_config.json that are ignored; "" if none are.

    These are beams, penalties, forced and suppressed tokens, and with a temperature top-k, top-p
    and the like: explanations are of the model's own distribution, so tokens come from it too.
    """
    settings = json.loads(model.generation_config.to_json_string(ignore_metadata=True))
    skipped = SET_BY_CALL if temperature else SET_BY_CALL | SAMPLING
    named = ", ".join(
        f"{name}={shown(settings[name])}"
        for name in vars(GenerationConfig())
        if name in settings.keys() - skipped
        and settings[name] is not None
        # 0 has an effect as the id of a token only.
        and (settings[name] or name.endswith("_token_id"))
        and settings[name] != NEUTRAL.get(name)
    )
    return f"Not applied: {named} of the model's generation_config.json." if named else ""


def check_embedded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    path: Path | str,
    text: str = "the text",
) -> None:
    """Raise InputError for a token without an embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    largest = max(ids, default=0)
    if largest >= len(weight):
        token = tokenizer.convert_ids_to_tokens(largest)
        raise InputError(
            f"{text} has the token {token!r} ({largest}) of the tokenizer of {path}, but the model "
            f"embeds {len(weight)} tokens: add others by model.resize_token_embeddings."
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw by a seed in the block, one thread at a time: all of them share torch's generator."""
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def write_after(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Tensor,
    tokens: int,
    temperature: float,
    seed: int,
    *,
    top_p: float = 1.0,
    enough: Callable[[Tensor], bool] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return ``prompt`` [1, T] and up to ``tokens`` generated tokens.

    With a ``mask``, 0 on padding to the left, several prompts [B, T] are continued.

    Of the model's generation_config.json, only the tokens that end a text are used. Generation
    stops when ``enough`` of all tokens so far is true.
    """
    seed = check_whole("the seed", seed, most=MAX_SEED)
    temperature = check_number(
        "the temperature",
        temperature,
        f"0 for the top token, or a number from {MIN_TEMPERATURE:g} on",
        lambda number: number == 0 or number >= MIN_TEMPERATURE,
    )
    if tokens == 0:
        return prompt
    defaults = model.generation_config
    padding = tokenizer.eos_token_id if defaults.pad_token_id is None else defaults.pad_token_id
    settings: dict[str, Any] = {"eos_token_id": defaults.eos_token_id, "pad_token_id": padding}
    if temperature:
        settings |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
    options: dict[str, Any] = {}
    if enough is not None:

        def criterion(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(ids),), enough(ids), device=ids.device)

        options["stopping_criteria"] = StoppingCriteriaList([criterion])  # pyright: ignore
    with evaluating(model), _seeded(seed) if temperature else nullcontext():
        ids = model.generate(  # pyright: ignore[reportCallIssue]
            inputs=prompt,
            attention_mask=torch.ones_like(prompt) if mask is None else mask,
            generation_config=_OwnSettings(max_length=prompt.shape[1] + tokens, **settings),
            **options,
        )
    assert isinstance(ids, Tensor)
    return ids
