"""Messages of a chat as the text that a model reads: what its tokenizer's template makes of them.

A chat model was trained on such text, with marks around each message, and answers a question that
has them. Without, it continues the question like any text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from prismlm.errors import InputError, check_text, first_line, shown
from prismlm.files import json_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prismlm.corpus.encode import Mark

Messages = Sequence[Mapping[str, Any]]
ASSISTANT = "assistant"
# Other names of roles, where messages are written as from and value.
ROLES = {"human": "user", "gpt": ASSISTANT, "function_call": ASSISTANT, "observation": "tool"}
# Planes for private use: characters that stand in for marks in a message.
PRIVATE = 0xF0000


def asked(question: str, system: str | None = None) -> Messages:
    """Return the messages of a question, after a system prompt."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": question}]


def question_of(text: str | Messages) -> str:
    """Return what is asked: a text, or the last message of the user."""
    if isinstance(text, str):
        return text
    return next((text_of(one.get("content")) for one in text[::-1] if one["role"] == "user"), "")


def is_messages(value: object) -> bool:
    """Say whether a value is meant as messages: a list that holds a record."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, Mapping) for one in cast("Sequence[object]", value)
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, a list of text parts, or none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in cast("list[dict[str, str]]", content))
    return content or ""


def as_messages(value: Any) -> Any:
    """Return the messages of a row with ``role`` and ``content``, anything else unchanged.

    Many sets of chats have ``from`` and ``value`` instead, as ShareGPT's; its human is the user,
    its function_call a tool call of the assistant. Nulls, which tables have for absent keys, go.
    """
    if not is_messages(value):
        return value
    return [_as_message(one) if isinstance(one, Mapping) else one for one in value]


def _as_message(given: Mapping[str, Any]) -> dict[str, Any]:
    present = {key: value for key, value in given.items() if value is not None}
    # Templates write arguments of tools as JSON, which takes no decimals.
    message = _mapped(present, lambda one: float(one) if isinstance(one, Decimal) else one)
    speaker = message.get("from")
    if not isinstance(speaker, str) or "value" not in message:
        return message
    role, said = ROLES.get(speaker, speaker), message["value"]
    try:
        call = json.loads(said) if speaker == "function_call" else None
    except (TypeError, ValueError, RecursionError):
        call = None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return {"role": role, "tool_calls": [{"type": "function", "function": call}]}
    return {"role": role, "content": said}


def _mapped(value: Any, change: Any) -> Any:
    """Return JSON values with each that is no list or record changed."""
    if isinstance(value, Mapping):
        return {key: _mapped(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(one, change) for one in value]
    return change(value)


def chat_text(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, goes_on: bool = False
) -> str:
    """Return messages as the chat template writes them, up to where an answer begins.

    Args:
        tokenizer: its template.
        messages: each with ``role`` and ``content``; after one of the assistant none begins.
        goes_on: leave the last message open, where it is the assistant's, to be continued.
    """
    return _rendered(tokenizer, messages, goes_on)[0]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, goes_on: bool = False
) -> list[int]:
    """Return the tokens of :func:`chat_text`, which begins as the template has it begin.

    They are those of ``apply_chat_template``, but marks of the template in a message are text.
    """
    from prismlm.corpus.encode import encoder_of

    text, marks = _rendered(tokenizer, messages, goes_on)
    encoder = encoder_of(tokenizer)
    if marks is None:
        return encoder.chat.encode(text, add_special_tokens=False).ids
    return encoder.encode_chat(text, marks)


def has_marks(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> bool:
    """Say whether anything in the messages is spelt like a special token."""
    from prismlm.corpus.encode import encoder_of

    marks, found = encoder_of(tokenizer).marks, list[Any]()
    _mapped(messages, lambda one: found.append(isinstance(one, str) and marks.search(one)))
    return any(found)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, goes_on: bool
) -> tuple[str, list[Mark] | None]:
    """Return what the template writes, and its marks if there are others in the messages.

    Before the template sees the messages, a character that they lack replaces each mark in them.
    """
    from prismlm.corpus.encode import encoder_of

    check_messages(messages)
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so no messages can "
            "be put to the model: give a text, or put the chat_template.jinja of the model that "
            "it was made from beside its tokenizer."
        )
    encoder, hidden = encoder_of(tokenizer), dict[int, str]()
    written = json_text(messages, default=str)
    free = (code for code in count(PRIVATE) if chr(code) not in written)

    def hide(mark: Any) -> str:
        hidden[code := next(free)] = mark[0]
        return chr(code)

    plain = _mapped(
        messages, lambda one: encoder.marks.sub(hide, one) if isinstance(one, str) else one
    )
    text = _written(tokenizer, plain, goes_on)
    if not hidden:
        return text, None

    def moved(place: int) -> int:
        return len(text[:place].translate(hidden))

    marks = [
        mark._replace(start=moved(mark.start), end=moved(mark.end))
        for mark in encoder.marks_in(text)
    ]
    return text.translate(hidden), marks


def _written(tokenizer: PreTrainedTokenizerBase, messages: Messages, goes_on: bool) -> str:
    """Return what the template makes of messages, in the first form of them that it takes.

    Templates differ in what they expect of a message without words beside its tool calls (no
    content, or an empty one) and of text parts (joined, or as a list).
    """
    call: Any = tokenizer.apply_chat_template
    answered = messages[-1]["role"] == ASSISTANT
    given = [{k: v for k, v in one.items() if v is not None} for one in messages]
    joined = [one | {k: text_of(v) for k, v in one.items() if k == "content"} for one in given]
    names = [call["function"]["name"] for one in messages for call in one.get("tool_calls") or ()]
    contents = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    # None of these may be missing from the text.
    parts = [*names, *(part["text"] for content in contents for part in content)]
    failure: InputError | None = None
    for form in (joined, [{"content": ""} | one for one in joined], given):
        try:
            text = call(
                form,
                tokenize=False,
                add_generation_prompt=not answered,
                continue_final_message=answered and goes_on,
            )
        except Exception as error:  # a template may raise whatever it likes
            failure = failure or InputError(
                f"the chat template of {tokenizer.name_or_path} refuses the messages "
                f"({first_line(error)}): expected roles that it knows, in an order that it takes, "
                "such as user, assistant, user."
            )
            continue
        left_out = next((part for part in parts if part.strip() not in text), None)
        if left_out is None:
            return text
        failure = InputError(
            f"the chat template of {tokenizer.name_or_path} leaves {shown(left_out)} out of its "
            "text: it does not take tool calls, or content in parts. Use a model whose template "
            "does, or leave these chats out."
        )
    assert failure is not None
    raise failure


def check_messages(messages: Messages, where: str = "the messages") -> None:
    """Raise InputError unless each message has a role and a content, or tool calls.

    A content is one text, or a list of parts ``{"type": "text", "text": …}``.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(
            f"{where}: {shown(messages)}, expected a list of at least one, of the user."
        )
    for number, message in enumerate(messages):
        given: Any = message if isinstance(message, Mapping) else {}
        calls, content = given.get("tool_calls"), given.get("content")
        if "role" not in given or not (calls or "content" in given):
            raise InputError(
                f"{where}: number {number} is {shown(message)}, expected a record with role and "
                'content, such as {"role": "user", "content": "What is malaria?"}.'
            )
        check_text(f"{where}: the role of number {number}", given["role"])
        if calls and not all(map(_is_call, calls if isinstance(calls, (list, tuple)) else [calls])):
            raise InputError(
                f"{where}: the tool_calls of number {number} are {shown(calls)}, expected records "
                'such as {"type": "function", "function": {"name": "get_weather", '
                '"arguments": {}}}.'
            )
        if calls and content is None:
            continue
        for part in content if is_messages(content) else [{"text": content}]:
            text = part.get("text") if isinstance(part, Mapping) else None
            if is_messages(content) and not isinstance(text, str):
                raise InputError(
                    f"{where}: the content of number {number} holds {shown(part)}, expected parts "
                    'of text, such as {"type": "text", "text": "What is malaria?"}.'
                )
            check_text(f"{where}: the content of number {number}", text)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
