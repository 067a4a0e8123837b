"""Messages of a chat: checking them, and rendering them by the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from prismlm.corpus.encode import Mark, encoder_of
from prismlm.errors import InputError, check_text, first_line, shown
from prismlm.files import json_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
ASSISTANT = "assistant"
# Roles in the format of ShareGPT.
ROLES = {"human": "user", "gpt": ASSISTANT, "function_call": ASSISTANT, "observation": "tool"}
# First private-use character: they replace special tokens inside messages.
PRIVATE = 0xF0000


def as_chat(question: str, system: str | None = None) -> Messages:
    """Return a question as messages, with an optional system prompt."""
    prompt = [] if system is None else [{"role": "system", "content": system}]
    return [*prompt, {"role": "user", "content": question}]


def question_of(text: str | Messages) -> str:
    """Return a text as it is, and the last message of the user of a chat, or ""."""
    if isinstance(text, str):
        return text
    return next((text_of(m.get("content")) for m in text[::-1] if m["role"] == "user"), "")


def asked_in(text: str | Messages) -> str:
    """Return all messages of the user of a chat; "" for a text."""
    said = [] if isinstance(text, str) else [m for m in text if m["role"] == "user"]
    return "\n".join(text_of(message.get("content")) for message in said)


def is_messages(value: object) -> bool:
    """Return whether a value is meant as messages: a list with a record in it."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, Mapping) for item in cast("Sequence[object]", value)
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, a list of text parts, or None."""
    if isinstance(content, (list, tuple)):
        return "".join(part["text"] for part in cast("Sequence[dict[str, str]]", content))
    return content or ""


def as_messages(value: Any) -> Any:
    """Convert messages to ``role`` and ``content``; return any other value unchanged.

    ShareGPT has ``from`` and ``value`` instead. Nulls, which tables have for absent keys, are
    removed.
    """
    if not is_messages(value):
        return value
    return [_as_message(item) if isinstance(item, Mapping) else item for item in value]


def _as_message(record: Mapping[str, Any]) -> dict[str, Any]:
    present = {key: value for key, value in record.items() if value is not None}
    # Templates serialise tool arguments as JSON, which does not support Decimal.
    message = _map_leaves(present, lambda v: float(v) if isinstance(v, Decimal) else v)
    if not isinstance(message.get("from"), str) or "value" not in message:
        return message
    return {"role": ROLES.get(message["from"], message["from"]), "content": message["value"]}


def _map_leaves(value: Any, function: Any) -> Any:
    """Apply a function to all values in nested lists and records."""
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_leaves(item, function) for item in value]
    return function(value)


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, continue_final: bool = False
) -> str:
    """Return the text of :func:`render_chat`."""
    return render_chat(tokenizer, messages, continue_final=continue_final)[0]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, continue_final: bool = False
) -> list[int]:
    """Encode messages as ``apply_chat_template`` does; special tokens in a message are text."""
    text, marks = render_chat(tokenizer, messages, continue_final=continue_final)
    return encoder_of(tokenizer).encode_chat(text, marks)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, continue_final: bool = False
) -> tuple[str, list[Mark] | None]:
    """Render messages by the chat template, up to where an answer begins.

    No answer begins after a message of the assistant; ``continue_final`` leaves that one open.
    If special tokens are spelled in a message, those of the template are returned as well. To find
    them, the ones in messages are replaced by unused characters before rendering.
    """
    check_messages(messages)
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so it cannot encode "
            "messages: give a text, or add the chat_template.jinja of the instruction-tuned model "
            "to the tokenizer's directory."
        )
    encoder, replaced = encoder_of(tokenizer), dict[int, str]()
    serialised = json_text(messages, default=str)
    unused = (code for code in count(PRIVATE) if chr(code) not in serialised)

    def replace(match: re.Match[str]) -> str:
        replaced[code := next(unused)] = match[0]
        return chr(code)

    plain = _map_leaves(
        messages, lambda v: encoder.marks.sub(replace, v) if isinstance(v, str) else v
    )
    text = _apply_template(tokenizer, plain, continue_final)
    if not replaced:
        return text, None
    marks = encoder.marks_in(text)
    ends = (len(text[:at].translate(replaced)) for mark in marks for at in (mark.start, mark.end))
    return text.translate(replaced), [Mark(mark.id, next(ends), next(ends)) for mark in marks]


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, continue_final: bool
) -> str:
    """Apply the chat template to the first form of the messages that it accepts.

    Templates differ in how they expect text parts (joined, or a list) and a message that has only
    tool calls (without content, or with an empty one).
    """
    answered = messages[-1]["role"] == ASSISTANT
    apply: Any = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        add_generation_prompt=not answered,
        continue_final_message=answered and continue_final,
    )
    listed = [{k: v for k, v in m.items() if v is not None} for m in messages]
    joined = [m | {k: text_of(v) for k, v in m.items() if k == "content"} for m in listed]
    contents = [m["content"] for m in listed if isinstance(m.get("content"), list)]
    # These must not be missing from the text.
    parts = [call["function"]["name"] for m in listed for call in m.get("tool_calls") or ()]
    parts += [part["text"] for content in contents for part in content]
    failure: InputError | None = None
    for form in (joined, [{"content": ""} | m for m in joined], listed):
        try:
            text = apply(form)
        except Exception as error:  # templates may raise anything
            failure = failure or InputError(
                f"the chat template of {tokenizer.name_or_path} refuses the messages "
                f"({first_line(error)}): expected roles that it knows, in a valid order such as "
                "user, assistant, user."
            )
            continue
        missing = next((part for part in parts if part.strip() not in text), None)
        missing = missing or _left_out(apply, form, text)
        if missing is None:
            return check_text("the chat", text)
        failure = InputError(
            f"the chat template of {tokenizer.name_or_path} leaves {shown(missing)} out of its "
            "text: it does not support system messages, tool calls, or content in parts. Use a "
            "model whose template does, or leave them out."
        )
    assert failure is not None
    raise failure


def _left_out(apply: Any, messages: Sequence[Any], text: str) -> str | None:
    """Return what a message says without which the text of a template would be the same."""
    for number, message in enumerate(messages):
        said = text_of(message.get("content"))
        # Templates may shorten a message, such as an earlier answer by its thoughts.
        if said.strip() not in text:
            with suppress(Exception):  # templates may raise anything
                if apply([*messages[:number], *messages[number + 1 :]]) == text:
                    return said
    return None


def check_messages(messages: Messages, where: str = "the messages") -> None:
    """Raise InputError unless each message has a role, and text, text parts or tool calls."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(
            f"{where}: {shown(messages)}, expected a list with at least one message of the user."
        )
    for number, message in enumerate(messages):
        if not _is_message(message):
            raise InputError(
                f"{where}: number {number} is {shown(message)}, expected a record with role and "
                'content, such as {"role": "user", "content": "What is malaria?"}. Content is a '
                'text or a list of {"type": "text", "text": …}; tool_calls are a list of '
                '{"type": "function", "function": {"name": …, "arguments": {}}}.'
            )
        check_text(f"{where}: the content of number {number}", text_of(message.get("content")))


def _is_message(message: Any) -> bool:
    record: Any = message if isinstance(message, Mapping) else {}
    calls, content = record.get("tool_calls") or (), record.get("content")
    parts: Any = content if isinstance(content, (list, tuple)) else [{"text": content}]
    return (
        isinstance(record.get("role"), str)
        and isinstance(calls, (list, tuple))
        and all(isinstance(_in(_in(call, "function"), "name"), str) for call in calls)
        and (
            (bool(calls) and content is None)
            or all(isinstance(_in(part, "text"), str) for part in parts)
        )
    )


def _in(record: Any, key: str) -> Any:
    return record.get(key) if isinstance(record, Mapping) else None
