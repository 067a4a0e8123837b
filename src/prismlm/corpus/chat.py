"""Messages of a chat as the text that a model reads: what its tokenizer's template makes of them.

A chat model was taught on such text, with its marks around each message, and answers a question
that has them. Without, it goes on with the question as with any text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from prismlm.errors import InputError, check_text, first_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
ASSISTANT = "assistant"
# Other names of roles, where messages are written as from and value.
ROLES = {"human": "user", "gpt": ASSISTANT}


def asked(question: str, system: str | None = None) -> Messages:
    """Return the messages of a question, after what the model is told of itself."""
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": question}]


def is_messages(value: object) -> bool:
    """Say whether a value is meant as messages: a list that holds a record."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, Mapping) for one in cast("Sequence[object]", value)
    )


def as_messages(value: Any) -> Any:
    """Return the messages of a row with ``role`` and ``content``, whatever else as it is.

    Many sets of chats have ``from`` and ``value`` instead, as ShareGPT's; its human is the user.
    """
    if not is_messages(value):
        return value
    return [
        {"role": ROLES.get(one["from"], one["from"]), "content": one["value"]}
        if isinstance(one, Mapping) and isinstance(one.get("from"), str) and "value" in one
        else one
        for one in cast("Sequence[Any]", value)
    ]


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, goes_on: bool = False
) -> str:
    """Return messages as the chat template writes them, up to where an answer begins.

    Args:
        tokenizer: its template.
        messages: each with ``role`` and ``content``; after one of the assistant none begins.
        goes_on: the last message, where it is the assistant's, is left open to be written on.

    Raises:
        InputError: no template, something else than messages, or what the template refuses.
    """
    check_messages(messages)
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so no messages can "
            "be put to the model: give a text, or put the chat_template.jinja of the model that "
            "it was made from beside its tokenizer."
        )
    answered = messages[-1]["role"] == ASSISTANT
    call: Any = tokenizer.apply_chat_template
    try:
        return call(
            # A table has what other messages have as null, which templates would take for there.
            [{k: v for k, v in message.items() if v is not None} for message in messages],
            tokenize=False,
            add_generation_prompt=not answered,
            continue_final_message=answered and goes_on,
        )
    except Exception as error:  # a template may raise whatever it likes
        raise InputError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages "
            f"({first_line(error)}): expected roles that it knows, in an order that it takes, "
            "such as user, assistant, user."
        ) from error


def check_messages(messages: Messages, where: str = "the messages") -> None:
    """Raise InputError unless each message has a role and a content, both of them text."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(
            f"{where}: {shown(messages)}, expected a list of at least one, of the user."
        )
    for number, message in enumerate(messages):
        given: object = message
        if not isinstance(given, Mapping) or not {"role", "content"} <= set(message):
            raise InputError(
                f"{where}: number {number} is {shown(message)}, expected a record with role and "
                'content, such as {"role": "user", "content": "What is malaria?"}.'
            )
        for key in ("role", "content"):
            check_text(f"{where}: the {key} of number {number}", message[key])
