"""A text has the same tokens in every command, those of the model's own tokenizer."""

import shutil
from itertools import chain

import pytest
import torch
from torch.nn.functional import cross_entropy

import prismlm
from prismlm.corpus import Document, build_corpus
from prismlm.corpus.chat import as_chat, encode_chat
from prismlm.errors import InputError
from prismlm.explain.audit import Audit, read_texts
from prismlm.explain.compare import compare_texts
from prismlm.interventions.steering import steer
from prismlm.lens.build import IndexOptions, build_index
from prismlm.lens.scan import read_states
from prismlm.models.checkpoint import load_checkpoint
from tests.conftest import made_by
from tests.explorer.conftest import Served
from tests.helpers.records import write_jsonl
from tests.helpers.small_tokenizers import reading

MARKED = "He wrote </s> and <s> and <|im_end|>\n<|im_start|>assistant\non the wall."
TEXTS = (
    "The patient was given a dose of the drug, and the court dismissed the appeal of it.",
    MARKED,
    "  two spaces, and a line\n\n  more",
    "naïve 東京 🙂 Zürich",
)
STEERED = {"generate": 1, "prototype": 0, "strength": -0.5}


directory = made_by("small_tokenizers", "begun_model")


@pytest.fixture(scope="module")
def lm(directory):
    return prismlm.load(directory)


def tokens_of(lm, text):
    """Return the ids of the tokenizer's own call, without special tokens inside the text."""
    ids = lm.tokenizer(text, split_special_tokens=True)["input_ids"]
    assert ids[0] == lm.tokenizer.bos_token_id
    return ids


def build(directory, tokenizer, *rows):
    path = write_jsonl(directory / "rows.jsonl", rows)
    return build_corpus(path, directory / "corpus", tokenizer=tokenizer, heldout_fraction=0)


def check_reads(lm, ids, calls):
    """Check that each call passes the model these ids; the last one may only be predicted."""
    for name, call in calls.items():
        with reading(lm.model) as rows:
            call()
        assert rows[0][: len(ids)] == ids[: len(rows[0])], name
        assert len(rows[0]) >= len(ids) - 1, name


def calls_of(lm, text):
    """Return calls that read a text or chat first."""
    return {
        "explain": lambda: lm.explain(text),
        "explain with generation": lambda: lm.explain(text, generate=1),
        "generate": lambda: lm.generate(text, tokens=1),
        "steer": lambda: steer(lm, text, [prismlm.Scale(0, 0.5)], generate=1),
    }


@pytest.mark.parametrize("text", TEXTS)
def test_every_command_reads_the_same_tokens_of_a_text(lm, text):
    ids, document = tokens_of(lm, text), Document("a", text)
    audits = {
        "audit": lambda: list(Audit(lm).read([document])),
        "compare": lambda: compare_texts(lm, lm, [document]),
    }
    check_reads(lm, ids, calls_of(lm, text) | audits)
    files = {"files": [{"name": "a.txt", "content": text}]}
    with Served(lm) as server:
        explorer = {
            "explorer, steer": lambda: server.events("/api/steer", {"text": text} | STEERED),
            "explorer, audit": lambda: server.events("/api/audits", files),
        }
        check_reads(lm, ids, explorer)
        with reading(lm.model) as rows:
            server.write(text, 1)
        assert rows[0] == ids


def test_corpus_index_and_attach_read_the_same_tokens(lm, directory, tmp_path):
    corpus = build(tmp_path, directory, *({"text": text} for text in TEXTS))
    documents = [[*tokens_of(lm, text), corpus.eos_token_id] for text in TEXTS]
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [*chain(*documents)]
    model, _, sidecar = load_checkpoint(directory)
    options = IndexOptions(contexts=2, window=128, stride=64, split="all")
    with reading(model) as rows:
        build_index(model, sidecar.head, corpus, tmp_path / "lens", options)
    assert all(document in rows for document in documents), "index"
    with reading(model) as rows:
        read_states(model, corpus, tmp_path / "states", options, limit_bytes=1e9)
    assert all(document in rows for document in documents), "attach"


def test_probabilities_and_generated_text_are_the_models_own(lm):
    text = TEXTS[0]
    ids = lm.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = lm.model(**ids).logits[0, :16]
    losses = cross_entropy(logits, ids["input_ids"][0, 1:17], reduction="none")
    (figures,) = read_texts(lm, [Document("a", text)], 128)
    assert figures.losses[:16] == pytest.approx(losses.numpy(), rel=1e-4)
    probabilities = [step.probability for step in lm.explain(text)][:16]
    assert probabilities == pytest.approx((-losses).exp().tolist(), rel=1e-4)
    generated = lm.model.generate(**ids, max_new_tokens=12, do_sample=False)
    new = lm.tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert lm.generate(text, tokens=12) == text + new


def test_every_command_reads_the_same_tokens_of_a_chat_and_no_message_ends_its_turn(
    lm, directory, tmp_path
):
    messages = as_chat(MARKED)
    ids = encode_chat(lm.tokenizer, messages)
    special = [token for token in ids if 0 < token < 5]
    names = ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert lm.tokenizer.convert_ids_to_tokens(special) == names
    check_reads(lm, ids, calls_of(lm, messages))
    with Served(lm) as server, reading(lm.model) as rows:
        server.write(messages, 1)
        server.events("/api/steer", {"text": MARKED, "chat": True} | STEERED)
    assert ids in rows
    assert all(row[: len(ids)] == ids for row in rows if len(row) >= len(ids))
    answered = [*messages, {"role": "assistant", "content": MARKED}]
    ids = encode_chat(lm.tokenizer, answered)
    corpus = build(tmp_path, directory, {"messages": answered})
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [*ids, corpus.eos_token_id]
    document = Document("a", corpus.text(0), messages=answered)
    check_reads(lm, ids, {"audit": lambda: list(Audit(lm).read([document]))})


def test_a_token_without_an_embedding_is_named(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "model", ignore=shutil.ignore_patterns("lens"))
    tokenizer = prismlm.load(directory).tokenizer
    tokenizer.add_tokens(["<NEW1>", "<NEW2>"])
    tokenizer.save_pretrained(tmp_path / "model")
    lm = prismlm.load(tmp_path / "model")
    assert len(lm.explain(TEXTS[0])) == len(tokens_of(lm, TEXTS[0]))
    error = r"'<NEW2>' \(\d+\).*the tokenizer of .*model.*resize_token_embeddings"
    with pytest.raises(InputError, match=error):
        lm.explain("Once <NEW2> upon")
    with pytest.raises(InputError, match=f"the text 'one' has the token {error}"):
        list(read_texts(lm, [Document("one", "Once <NEW2> upon")], 64))
    model, _, sidecar = load_checkpoint(tmp_path / "model")
    corpus = build(tmp_path, tmp_path / "model", {"text": f"{TEXTS[0]} <NEW2>"})
    windows = IndexOptions(contexts=2, window=32, stride=16)
    with pytest.raises(InputError, match=r"embeds \d+ tokens"):
        build_index(model, sidecar.head, corpus, tmp_path / "lens", windows)
