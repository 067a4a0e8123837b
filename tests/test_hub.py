"""A hub that does not answer, simulated by a silent socket, is reported within seconds."""

import socket
import time
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from prismlm import hub
from prismlm.corpus import HubDataset, load_tokenizer
from prismlm.corpus.read import DatasetReader
from prismlm.errors import InputError
from prismlm.models.base import find_base


@pytest.fixture
def silent(monkeypatch):
    """The address of a port that accepts connections and never answers."""
    assert hub.SECONDS < 9
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield address


@pytest.mark.parametrize(
    "load",
    [load_tokenizer, find_base, lambda name: DatasetReader(HubDataset(name))],
    ids=["tokenizer", "model", "dataset"],
)
def test_a_silent_hub_is_named(silent, load):
    began = time.monotonic()
    assert silent in (hub.hub_error() or "")
    with pytest.raises(InputError, match=silent):
        load("nobody/has-this")
    assert time.monotonic() - began < 5


def test_a_model_that_may_be_private_says_how_to_log_in(monkeypatch):
    refuse = Mock(side_effect=PermissionError("401 Client Error"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(InputError, match=r"401 Client Error.*hf auth login"):
        hub.model_directory("somebody/private")
