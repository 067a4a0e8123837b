"""A chat template for the tiny model, and chats."""

from __future__ import annotations

import shutil
from pathlib import Path

# As real ones are: marks around each message, nothing after the assistant's, and one that refuses.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('Tools are not known here') }}{% endif %}"
    "{% if message.tool_calls is defined %}calls{% endif %}"
    "<{{ message.role }}>\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
QUESTION = "What does the drug do to the patient?"
ANSWER = "The patient was given a dose, and the court dismissed the appeal."
ASKED = f"<user>\n{QUESTION}<|endoftext|>\n<assistant>\n"
ANSWERED = f"{ASKED}{ANSWER}<|endoftext|>\n"
CHAT = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
# The same chat as ShareGPT's are written.
SHARED = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]


def chatting(model: Path, directory: Path) -> Path:
    """Return a copy of a model directory that has the template."""
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
