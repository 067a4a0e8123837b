"""Messages of a chat as the text that a model reads: what its tokenizer's template makes of them.

A chat model was taught on such text, with its marks around each message, and answers a question
that has them. Without, it goes on with the question as with any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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


def asked(question: str, system: str | None = None) -> Messages:
    """Return the messages of a question, after what the model is told of itself."""
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": question}]


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


def as_messages(value: Any) -> Any:
    """Return the messages of a row with ``role`` and ``content``, anything else unchanged.

    Many sets of chats have ``from`` and ``value`` instead, as ShareGPT's; its human is the user,
    its function_call a tool call of the assistant. Nulls, which tables have for absent keys, go.
    """
    if not is_messages(value):
        return value
    return [_as_message(one) if isinstance(one, Mapping) else one for one in value]


def _as_message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: _plain(value) for key, value in given.items() if value is not None}
    speaker = message.get("from")
    if not isinstance(speaker, str) or "value" not in message:
        return message
    role, said = ROLES.get(speaker, speaker), message["value"]
    call = _function_call(said) if speaker == "function_call" else None
    if call is not None:
        return {"role": role, "tool_calls": [{"type": "function", "function": call}]}
    return {"role": role, "content": said}


def _function_call(said: Any) -> dict[str, Any] | None:
    """Return a tool call that is written as JSON with a name, or None."""
    try:
        call = json.loads(said)
    except (TypeError, ValueError, RecursionError):
        return None
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else None


def _plain(value: Any) -> Any:
    # Templates write arguments of tools as JSON, which takes no decimals.
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(one) for one in cast("list[Any]", value)]
    return float(value) if isinstance(value, Decimal) else value


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, a list of text parts, or none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in cast("list[dict[str, str]]", content))
    return content or ""


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
    return _rendered(tokenizer, messages, goes_on)[0]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, goes_on: bool = False
) -> list[int]:
    """Return the tokens of :func:`chat_text`, which begins as the template has it begin.

    They are those of ``apply_chat_template``, but marks of the template in a message are text.

    Raises:
        InputError: as :func:`chat_text`, or the tokenizer is not a fast one.
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

    return bool(_without_marks(messages, encoder_of(tokenizer).marks)[1])


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, goes_on: bool
) -> tuple[str, list[Mark] | None]:
    """Return what the template writes, and its marks if there are others in the messages.

    These are taken out of the messages before the template sees them, and put back afterwards.
    """
    from prismlm.corpus.encode import encoder_of

    check_messages(messages)
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so no messages can "
            "be put to the model: give a text, or put the chat_template.jinja of the model that "
            "it was made from beside its tokenizer."
        )
    encoder = encoder_of(tokenizer)
    plain, hidden = _without_marks(messages, encoder.marks)
    answered = messages[-1]["role"] == ASSISTANT
    try:
        text = _written(tokenizer, plain, answered, answered and goes_on)
    except InputError:
        raise
    except Exception as error:  # a template may raise whatever it likes
        raise InputError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages "
            f"({first_line(error)}): expected roles that it knows, in an order that it takes, "
            "such as user, assistant, user."
        ) from error
    if not hidden:
        return text, None
    back = {ord(stand_in): mark for stand_in, mark in hidden.items()}

    def moved(place: int) -> int:
        return len(text[:place].translate(back))

    found = encoder.marks_in(text)
    marks = [one._replace(start=moved(one.start), end=moved(one.end)) for one in found]
    return text.translate(back), marks


def _without_marks(messages: Messages, marks: re.Pattern[str]) -> tuple[Any, dict[str, str]]:
    """Return messages with a character of its own for each mark in them, and which is for which."""
    hidden: dict[str, str] = {}

    def strings(value: Any) -> Any:
        if isinstance(value, str):
            return marks.sub(stand_in, value)
        if isinstance(value, Mapping):
            return {key: strings(one) for key, one in value.items()}
        return [strings(one) for one in value] if isinstance(value, (list, tuple)) else value

    def unused() -> Iterator[str]:
        written = json_text(messages, default=str)
        # Of a plane for private use.
        yield from (chr(code) for code in count(0xF0000) if chr(code) not in written)

    free = unused()

    def stand_in(found: re.Match[str]) -> str:
        character = next(free)
        hidden[character] = found[0]
        return character

    return strings(messages), hidden


def _written(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, answered: bool, goes_on: bool
) -> str:
    """Return what the template makes of messages, in the first form of them that it takes.

    Templates differ in what they expect of a message without words beside its tool calls (no
    content, or an empty one) and of text parts (joined, or as a list).

    Raises:
        InputError: no form of the messages has all its parts and tool calls in the text.
        Exception: what the template raises at the first form.
    """
    call: Any = tokenizer.apply_chat_template
    failure: Exception | None = None
    for form in _forms(messages):
        try:
            text = call(
                form,
                tokenize=False,
                add_generation_prompt=not answered,
                continue_final_message=goes_on,
            )
        except Exception as error:  # a template may raise whatever it likes
            failure = failure or error
            continue
        left_out = next((part for part in _parts(messages) if part.strip() not in text), None)
        if left_out is None:
            return text
        failure = InputError(
            f"the chat template of {tokenizer.name_or_path} leaves {shown(left_out)} out of its "
            "text: it does not take tool calls, or content in parts. Use a model whose template "
            "does, or leave these chats out."
        )
    assert failure is not None
    raise failure


def _forms(messages: Messages) -> list[list[dict[str, Any]]]:
    given = [{k: v for k, v in one.items() if v is not None} for one in messages]
    joined = [
        one | ({"content": text_of(one["content"])} if "content" in one else {}) for one in given
    ]
    empty = [{"content": ""} | one for one in joined]
    forms = [joined, empty, given]
    return [form for number, form in enumerate(forms) if form not in forms[:number]]


def _parts(messages: Messages) -> list[str]:
    """Return what must be found in a template's text: names of called tools, and text parts."""
    names = [call["function"]["name"] for one in messages for call in one.get("tool_calls") or ()]
    contents = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    return [*names, *(part["text"] for content in contents for part in content)]


def check_messages(messages: Messages, where: str = "the messages") -> None:
    """Raise InputError unless each message has a role and a content, or tool calls.

    A content is one text, or a list of parts ``{"type": "text", "text": …}``.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(
            f"{where}: {shown(messages)}, expected a list of at least one, of the user."
        )
    for number, message in enumerate(messages):
        given: object = message
        called = isinstance(given, Mapping) and message.get("tool_calls")
        if (
            not isinstance(given, Mapping)
            or "role" not in given
            or not (called or "content" in given)
        ):
            raise InputError(
                f"{where}: number {number} is {shown(message)}, expected a record with role and "
                'content, such as {"role": "user", "content": "What is malaria?"}.'
            )
        check_text(f"{where}: the role of number {number}", message["role"])
        if called:
            _check_calls(called, f"{where}: the tool_calls of number {number}")
        if not (called and message.get("content") is None):
            _check_content(message.get("content"), f"{where}: the content of number {number}")


def _check_calls(calls: Any, where: str) -> None:
    for call in calls if isinstance(calls, (list, tuple)) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                f"{where} hold {shown(call)}, expected records such as "
                '{"type": "function", "function": {"name": "get_weather", "arguments": {}}}.'
            )


def _check_content(content: Any, where: str) -> None:
    for part in cast("list[Any]", content) if is_messages(content) else ():
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise InputError(
                f"{where} holds {shown(part)}, expected parts of text, such as "
                '{"type": "text", "text": "What is malaria?"}.'
            )
        check_text(where, part["text"])
    if not is_messages(content):
        check_text(where, content)
