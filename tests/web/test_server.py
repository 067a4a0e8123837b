"""OpenAI's own client, over real HTTP, compared with what `explain` gives for the same text."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

import prismlm
from prismlm.web import create_app
from prismlm.web.guard import MAX_BODY_BYTES
from tests.helpers.chats import ANSWER, CHAT, QUESTION
from tests.helpers.running import slowed
from tests.web.conftest import Served

ASKED = [{"role": "user", "content": QUESTION}]
TEXT = "The patient was given a dose of the drug"


def user(content):
    return [{"role": "user", "content": content}]


def assert_sources(value, trace, by="domain"):
    """A `prismlm` object has the sources of a trace."""
    assert value["support"]["level"] == trace.support.level
    assert value["support"]["score"] == pytest.approx(trace.support.score, abs=1e-4)
    assert value["support"]["sentence"] == trace.support.sentence
    assert value["sources"]["by"] == by
    shares = {item["key"]: item["share"] for item in value["sources"]["items"]}
    expected = {item.key: item.share for item in trace.sources(by).items}
    assert shares == pytest.approx(expected, abs=1e-3)
    documents = [document["doc_id"] for document in value["documents"][:3]]
    assert documents == [document.doc_id for document in trace.documents(3)]
    assert [q["text"] for q in value["verbatim"]] == [q.text for q in trace.verbatim(5)]


def test_an_answer_is_what_explain_gives(served, lm):
    trace = lm.explain(ASKED, generate=12)
    answer = served.chat(ASKED, max_completion_tokens=12)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", trace.answer)
    assert_sources(answer.prismlm, trace)
    assert answer.prismlm["summary"] == trace.summary
    assert answer.prismlm["passages"][0]["text"] == trace.passages(1)[0].text
    prompt = len(lm.tokens_of(ASKED, 12))
    written = len(trace) - prompt + 1
    used = answer.usage
    counts = used.prompt_tokens, used.completion_tokens, used.total_tokens
    assert counts == (prompt, written, prompt + written)
    assert choice.finish_reason == ("stop" if written < 12 else "length")
    # So is the continuation of a text.
    trace = lm.explain(TEXT, generate=9)
    answer = served.complete(TEXT, max_tokens=9, extra_body={"prismlm": {"by": "license"}})
    assert answer.choices[0].text == trace.answer
    assert_sources(answer.prismlm, trace, "license")


def words_of(answer):
    """Return the text of a response or a chunk, and its tokens with their log-probabilities."""
    (choice,) = answer.choices
    if hasattr(choice, "text"):
        logprobs = choice.logprobs
        if logprobs is None:
            return choice.text, []
        words = zip(logprobs.text_offset, logprobs.tokens, strict=True)
        return choice.text, list(zip(words, logprobs.token_logprobs, strict=True))
    message = getattr(choice, "delta", None) or choice.message
    tokens = choice.logprobs.content if choice.logprobs else ()
    return message.content or "", [(token.token, token.logprob) for token in tokens]


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_has_the_same_in_chunks(served, chat):
    ask = partial(served.chat, ASKED, top_logprobs=2) if chat else partial(served.complete, TEXT)
    ask = partial(ask, max_tokens=12, logprobs=True if chat else 2)
    whole = ask()
    *parts, last, usage = ask(stream=True, stream_options={"include_usage": True})
    assert len(parts) > 3
    texts, tokens = zip(*map(words_of, parts), strict=True)
    text, expected = words_of(whole)
    assert "".join(texts) == text
    streamed = [token for some in tokens for token in some]
    assert [word for word, _ in streamed] == [word for word, _ in expected]
    assert [p for _, p in streamed] == pytest.approx([p for _, p in expected], abs=1e-4)
    assert {part.choices[0].finish_reason for part in parts} == {None}
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(not hasattr(part, "prismlm") for part in [*parts, usage])
    assert last.prismlm["documents"][0]["doc_id"] == whole.prismlm["documents"][0]["doc_id"]
    assert (usage.choices, usage.usage) == ([], whole.usage)
    if chat:
        assert parts[0].choices[0].delta.role == "assistant"
        annotations = [one.model_dump() for one in whole.choices[0].message.annotations]
        assert last.choices[0].delta.annotations == annotations


def test_log_probabilities_are_the_models_own(served, lm):
    answer = served.chat(ASKED, max_tokens=6, temperature=3, seed=4, top_logprobs=3)
    ids = lm.tokens_of(ASKED, 6)
    for token in answer.choices[0].logprobs.content:
        with torch.no_grad():
            expected = lm.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        top = [other.logprob for other in token.top_logprobs]
        assert top == pytest.approx(expected.topk(3).values.tolist(), abs=1e-3)
        drawn = min(
            (i for i in range(len(expected)) if lm.tokenizer.decode([i]) == token.token),
            key=lambda i: abs(expected[i] - token.logprob),
        )
        assert float(expected[drawn]) == pytest.approx(token.logprob, abs=1e-3)
        assert bytes(token.bytes).decode() == token.token
        ids.append(drawn)


def test_a_seed_draws_what_generate_draws(served, lm):
    def drawn(server=served, **options):
        return server.complete(TEXT, max_tokens=16, **options).choices[0].text

    hot, prompt, texts = {"temperature": 1.5, "seed": 7}, lm.encode(TEXT), []
    for seed in (0, 7):
        texts.append(drawn(temperature=1.5, seed=seed))
        assert TEXT + texts[-1] == lm.generate(TEXT, tokens=16, temperature=1.5, seed=seed)
    assert texts[0] != texts[1]
    for top_p in (0.3, 0.9):
        ids = lm.write(prompt, 16, 1.5, 7, top_p=top_p)
        expected = lm.words(ids[0, prompt.shape[1] :])
        assert drawn(**hot, top_p=top_p) == expected
    # So little of the probability is the top token's.
    assert drawn(**hot, top_p=0) == drawn()
    # As a model that writes one text at a time does.
    with Served(lm, batch_size=1) as single:
        assert drawn(single, **hot, top_p=0.9) == expected


def test_a_text_ends_before_a_stop_sequence(served, lm):
    whole = served.complete(TEXT, max_tokens=24).choices[0].text
    stop = whole[len(whole) // 2 :][:5]
    before = whole[: whole.index(stop)]
    answer = served.complete(TEXT, max_tokens=24, stop=["never written", stop], logprobs=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
    assert "".join(answer.choices[0].logprobs.tokens).startswith(before)
    chunks = list(served.complete(TEXT, max_tokens=24, stop=stop, stream=True, logprobs=0))
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    # What it relies on is of the text up to there, and no more.
    trace = lm.explain(TEXT, generate=answer.usage.completion_tokens)
    assert trace.answer.startswith(before)
    assert_sources(answer.prismlm, trace)
    # Nothing is written if the text begins with one.
    empty = served.complete(TEXT, max_tokens=8, stop=whole[:2])
    assert (empty.choices[0].text, empty.prismlm) == ("", None)
    assert empty.usage.completion_tokens == 0


def test_sources_are_limited_or_left_out_and_neutral_parameters_accepted(served):
    few = served.chat(ASKED, max_tokens=4, extra_body={"prismlm": {"documents": 1}})
    assert len(few.prismlm["documents"]) == len(few.prismlm["passages"]) == 1
    neutral = dict.fromkeys(("temperature", "top_p", "stop", "seed", "stream"))
    neutral |= {"n": 1, "tools": [], "response_format": {"type": "text"}, "user": "me"}
    none = {"max_tokens": 4, "extra_body": {"prismlm": False}}
    plain = served.chat(ASKED, **none, **neutral)
    parts = served.chat(user([{"type": "text", "text": QUESTION}]), **none)
    assert plain.choices[0].message == parts.choices[0].message
    assert not hasattr(plain, "prismlm")
    assert plain.choices[0].message.annotations == []


def test_an_answer_of_any_engine_is_attributed(served, lm):
    trace = lm.explain(CHAT)
    for body in ({"messages": CHAT}, {"messages": CHAT[:1], "answer": ANSWER}):
        value = served.attribute(**body, prismlm={"by": "source"})
        assert_sources(value["prismlm"], trace, "source")
    # The prompt is read with the answer, and is no part of it.
    value = served.attribute(prompt=TEXT, answer=" and then died.")
    first = len(lm.tokens_of(TEXT)) - 1
    answer = lm.explain(TEXT + " and then died.")[first:]
    shares = {item["key"]: item["share"] for item in value["prismlm"]["sources"]["items"]}
    expected = {item.key: item.share for item in answer.sources("domain").items}
    assert shares == pytest.approx(expected, abs=1e-3)
    assert value["usage"]["prompt_tokens"] == first + 1


def test_sentences_of_the_corpus_are_cited(served, lm):
    """An answer that is a document's own text: annotations lie where its sentences are."""
    cited = []
    for number in range(0, 60, 3):
        text = lm.lens.corpus.text(number)[:400].rpartition(".")[0] + "."
        # What is cited names something of the question.
        asked = user(f"What of {max(text.split(), key=len)}?")
        for annotation in served.attribute(messages=asked, answer=text)["annotations"]:
            assert annotation["type"] == "url_citation"
            place = annotation["url_citation"]
            sentence = text[place["start_index"] : place["end_index"]]
            assert sentence == sentence.strip() != ""
            assert place["url"]
            cited.append(place["url"] == lm.lens.cells.facts(number)["url"])
    assert sum(cited) > 5


UNSUPPORTED, TOO_LONG = "unsupported_parameter", "context_length_exceeded"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PICTURED = user([{"type": "text", "text": "What is this?"}, IMAGE])
LONG = "drug " * 600
ANSWERED = [*ASKED, {"role": "assistant", "content": LONG}]


@pytest.mark.parametrize(
    ("method", "options", "code", "param", "words"),
    [
        ("chat", {"n": 2}, UNSUPPORTED, "n", "n=2"),
        ("chat", {"tools": [TOOL]}, UNSUPPORTED, "tools", ""),
        ("chat", {"extra_body": {"top_k": 5}}, UNSUPPORTED, "top_k", ""),
        ("complete", {"extra_body": {"temprature": 1}}, UNSUPPORTED, "temprature", "temprature=1"),
        ("chat", {"temperature": -1}, None, "temperature", ""),
        ("chat", {"messages": PICTURED}, None, "messages.0.content.str", "should be 'text'"),
        ("chat", {"extra_body": {"prismlm": {"by": "licence"}}}, None, "prismlm.bool", "'license'"),
        ("chat", {"messages": user(LONG)}, TOO_LONG, "messages", ""),
        ("complete", {"prompt": ["a", "b"]}, None, "prompt.str", "at most 1"),
        ("complete", {"max_tokens": 5000}, TOO_LONG, "prompt", "5000 to generate"),
        ("attribute", {"messages": ANSWERED}, TOO_LONG, "messages", "shorten it"),
        ("complete", {"prompt": "x" * 10**6}, TOO_LONG, "prompt", "more than 512 tokens"),
        ("chat", {"messages": ASKED * 1000}, TOO_LONG, "messages", "more than 512"),
    ],
)
def test_what_is_not_served_is_refused_in_openais_form(served, method, options, code, param, words):
    defaults = {"chat": {"messages": ASKED}, "complete": {"prompt": TEXT}, "attribute": {}}
    with pytest.raises(openai.BadRequestError) as caught:
        getattr(served, method)(**{"max_tokens": 2} | defaults[method] | options)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in caught.value.message


def test_errors_are_json_in_openais_form(served):
    for method, path, body, headers, status in (
        ("POST", "/v1/chat/completions", b'{"model": "ti', {}, 400),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"\\ud800"}', {}, 400),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": ""}, {}, 400),
        ("POST", "/v1/attributions", {"model": "tiny", "prompt": "a"}, {}, 400),
        ("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/completions", b" " * (MAX_BODY_BYTES + 1), {}, 413),
        ("GET", "/nothing", None, {}, 404),
    ):
        actual, _, text = served.ask(method, path, body, headers)
        error = json.loads(text)["error"]
        assert actual == status, text
        assert error["message"]
        assert error["type"] == "invalid_request_error"
        assert error.keys() == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError, match="'tiny'") as caught:
        served.client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_models_health_and_metrics(served):
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert json.loads(served.ask("GET", "/health")[2])["status"] == "ok"
    served.complete(TEXT, max_tokens=3)
    lines = served.ask("GET", "/metrics")[2].decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line[0] != "#")
    figures = {name: float(value) for name, value in pairs}
    assert figures['prismlm_tokens_total{kind="completion"}'] >= 3
    assert figures['prismlm_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert figures["prismlm_attribution_seconds_count"] >= 1
    assert figures["prismlm_requests_running"] <= 1


def test_a_key_and_a_name_of_this_server_are_needed_wherever_it_is_mounted(served):
    outer = FastAPI()
    outer.mount("/llm", create_app(served.lm, api_key="sesamé"))
    with TestClient(outer) as client:

        def ask(key, path="v1/models"):
            headers = {"Authorization": key.encode()} if key else {}
            return client.get(f"/llm/{path}", headers=headers)

        for wrong in ("Bearer other", "Bearer sesame", "Bearer", "Basic sesamé"):
            assert ask(wrong).status_code == 401
        assert "API key" in ask(None).json()["error"]["message"]
        assert ask("Bearer sesamé").status_code == ask(None, "health").status_code == 200
    for empty in ("", " "):
        with pytest.raises(prismlm.errors.InputError, match="key is empty"):
            create_app(served.lm, api_key=empty)
    # A name of another site that points here is refused.
    app = create_app(served.lm, hosts=("127.0.0.1", "[::1]"))
    for host, status in (("127.0.0.1", 200), ("[::1]", 200), ("evil.example", 421)):
        for port in ("", ":8000"):
            client = TestClient(app, base_url=f"http://{host}{port}")
            assert client.get("/v1/models").status_code == status


def wait_until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("together", [1, 2])
def test_a_full_queue_refuses_and_a_client_that_leaves_frees_a_place(lm, together):
    with slowed(lm), Served(lm, batch_size=together, max_waiting=1) as server:
        begin = partial(server.complete, TEXT, max_tokens=400, stream=True)
        streams = [begin() for _ in range(together)]
        wait_until(lambda: server.engine.running == together)
        waiting = begin()
        with pytest.raises(openai.RateLimitError) as caught:
            server.complete(TEXT, max_tokens=1)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        # One that waits leaves, and one that is written.
        waiting.close()
        streams.pop().close()
        wait_until(lambda: server.engine.running < together)
        assert server.complete(TEXT, max_tokens=2).usage.completion_tokens == 2
        # And one that does not stream, whose client gives up.
        server.client = server.client.with_options(timeout=0.5)
        with pytest.raises(openai.APITimeoutError):
            server.complete(TEXT, max_tokens=400)
        wait_until(lambda: server.engine.running + server.engine.waiting == len(streams))
        for stream in streams:
            stream.close()


def test_a_lens_that_was_built_again_is_refused(chat_model, tmp_path):
    model = shutil.copytree(chat_model, tmp_path / "model")
    with Served(prismlm.load(model)) as server:
        server.complete(TEXT, max_tokens=2)
        (model / "lens" / "sample" / "meta.json").unlink()
        with pytest.raises(openai.ConflictError, match="rebuilt or removed") as caught:
            server.complete(TEXT, max_tokens=2)
        assert caught.value.code == "stale_lens"
        with pytest.raises(openai.ConflictError):
            server.attribute(messages=CHAT)
        assert server.ask("GET", "/health")[0] == 409
        # The model itself is still the model.
        plain = server.complete(TEXT, max_tokens=2, extra_body={"prismlm": False})
        assert plain.usage.completion_tokens == 2


@pytest.mark.parametrize("together", [1, 8])
def test_an_error_of_the_model_is_reported_and_others_are_served(lm, together):
    with Served(lm, batch_size=together) as server:
        hook = lm.model.base_model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(openai.APIStatusError, match="ZeroDivisionError in the server"):
            server.complete(TEXT, max_tokens=2, timeout=30)
        with pytest.raises(openai.APIError, match="ZeroDivisionError in the server"):
            list(server.complete(TEXT, max_tokens=2, timeout=30, stream=True))
        hook.remove()
        assert server.complete(TEXT, max_tokens=2, timeout=30).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("clients", "seconds"), [(24, 0), pytest.param(200, 60, marks=pytest.mark.slow)]
)
def test_many_clients_lose_nothing(lm, clients, seconds):
    """Each asks again until the time is over, at least once."""
    texts = [f"{TEXT} on day {number} of the {number % 7} weeks" for number in range(clients)]
    expected = [lm.generate(text, tokens=6 + number % 5) for number, text in enumerate(texts)]
    ends = time.monotonic() + seconds

    def ask(number):
        options, answers = {"max_tokens": 6 + number % 5, "stream": number % 2 == 1}, []
        while not answers or time.monotonic() < ends:
            answer = server.complete(texts[number], **options)
            parts = list(answer) if options["stream"] else [answer]
            answers.append(("".join(part.choices[0].text for part in parts), parts[-1].prismlm))
        return answers

    with (
        Served(lm, batch_size=6, max_waiting=clients) as server,
        ThreadPoolExecutor(clients) as threads,
    ):
        answers = list(threads.map(ask, range(clients)))
        assert (server.engine.waiting, server.engine.running) == (0, 0)
    for text, whole, of_client in zip(texts, expected, answers, strict=True):
        for written, value in of_client:
            assert text + written == whole
            assert value["support"]["level"] in ("strong", "weak", "none")


def test_a_generate_that_ends_without_asking_ends_the_answer(lm, monkeypatch):
    monkeypatch.setattr(lm.model, "generate", lambda inputs, **_: inputs)
    with Served(lm, batch_size=1) as server:
        answer = server.complete("a", timeout=30)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
