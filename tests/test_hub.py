"""A hub that does not answer is told of in seconds, by a socket that takes calls and is silent."""

import socket
import time

import pytest
from huggingface_hub import constants

from prismlm import hub
from prismlm.corpus import HubDataset, load_tokenizer
from prismlm.corpus.datasets import DatasetReader
from prismlm.errors import InputError
from prismlm.models.base import find_base


@pytest.fixture
def silent(monkeypatch):
    """The address of a port that is listened on, where nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield address


def test_a_hub_that_never_answers_is_told_of_within_ten_seconds(silent, monkeypatch):
    assert hub.SECONDS < 9
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    began = time.monotonic()
    said = hub.silence()
    assert time.monotonic() - began < 2
    assert said is not None
    assert silent in said


@pytest.mark.parametrize(
    "ask",
    [
        lambda: load_tokenizer("nobody/has-this"),
        lambda: find_base("nobody/has-this"),
        lambda: DatasetReader(HubDataset("nobody/has-this")),
    ],
    ids=["tokenizer", "model", "dataset"],
)
def test_whoever_needs_it_says_so(silent, monkeypatch, ask):
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(InputError, match=silent):
        ask()
    assert time.monotonic() - began < 5


def test_a_hub_that_is_not_there_and_one_that_is_not_asked(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.silence() is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "cannot be reached" in (hub.silence() or "")
