"""OpenAI's own client, over real HTTP, beside what `explain` says of the same text."""

import json
import shutil
import time

import openai
import pytest
import schemathesis
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings

import prismlm
from prismlm.web import create_app
from tests.explorer.conftest import unhurried
from tests.helpers.chats import ANSWER, CHAT, QUESTION
from tests.web.conftest import Served

ASKED = [{"role": "user", "content": QUESTION}]
TEXT = "The patient was given a dose of the drug"
CASES = 8  # of each route


def kept(trace, by="domain"):
    """What the server says of an answer, as `explain` says it."""
    return {
        "level": trace.support.level,
        "score": pytest.approx(trace.support.score, abs=1e-4),
        "shares": {one.key: pytest.approx(one.share, abs=1e-3) for one in trace.sources(by).items},
        "documents": [one.doc_id for one in trace.documents(3)],
        "verbatim": [one.text for one in trace.verbatim(5)],
    }


def said(value, documents=3):
    """The same of a `prismlm` object."""
    return {
        "level": value["support"]["level"],
        "score": value["support"]["score"],
        "shares": {one["key"]: one["share"] for one in value["sources"]["items"]},
        "documents": [one["doc_id"] for one in value["documents"][:documents]],
        "verbatim": [one["text"] for one in value["verbatim"]],
    }


def test_an_answer_is_what_explain_says(served, lm):
    trace = lm.explain(ASKED, generate=12)
    answer = served.chat(ASKED, max_completion_tokens=12)
    (choice,) = answer.choices
    assert choice.message.content == trace.answer
    assert choice.message.role == "assistant"
    assert said(answer.prismlm) == kept(trace)
    assert answer.prismlm["support"]["sentence"] == trace.support.sentence
    assert answer.prismlm["summary"] == trace.summary
    assert answer.prismlm["passages"][0]["text"] == trace.passages(1)[0].text
    prompt = len(lm.tokens_of(ASKED, 12))
    written = len(trace) - prompt + 1
    used = answer.usage
    counts = used.prompt_tokens, used.completion_tokens, used.total_tokens
    assert counts == (prompt, written, prompt + written)
    assert choice.finish_reason == ("stop" if written < 12 else "length")


def test_a_prompt_is_written_on(served, lm):
    trace = lm.explain(TEXT, generate=9)
    answer = served.complete(TEXT, max_tokens=9, extra_body={"prismlm": {"by": "license"}})
    assert answer.choices[0].text == trace.answer
    assert said(answer.prismlm) == kept(trace, "license")
    assert answer.prismlm["sources"]["by"] == "license"


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_says_the_same_piece_by_piece(served, chat):
    def ask(**options):
        if chat:
            more = {"logprobs": True, "top_logprobs": 2}
            return served.chat(ASKED, max_tokens=12, **options, **more)
        return served.complete(TEXT, max_tokens=12, logprobs=2, **options)

    def text(choice, whole):
        if not chat:
            return choice.text
        return (choice.message if whole else choice.delta).content or ""

    def tokens(choice):
        found = choice.logprobs
        if found is None:
            return []
        if chat:
            return [(one.token, one.logprob) for one in found.content]
        return list(zip(found.tokens, found.token_logprobs, strict=True))

    whole = ask()
    *parts, last, usage = ask(stream=True, stream_options={"include_usage": True})
    assert len(parts) > 3
    assert "".join(text(one.choices[0], False) for one in parts) == text(whole.choices[0], True)
    told = [token for one in parts for token in tokens(one.choices[0])]
    for (word, value), (expected, wanted) in zip(told, tokens(whole.choices[0]), strict=True):
        assert word == expected
        assert value == pytest.approx(wanted, abs=1e-4)
    assert {one.choices[0].finish_reason for one in parts} == {None}
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(not hasattr(one, "prismlm") for one in [*parts, usage])
    assert last.prismlm["documents"][0]["doc_id"] == whole.prismlm["documents"][0]["doc_id"]
    assert usage.choices == []
    assert usage.usage == whole.usage
    if chat:
        assert parts[0].choices[0].delta.role == "assistant"
        assert last.choices[0].delta.annotations == [
            one.model_dump() for one in whole.choices[0].message.annotations
        ]


def test_log_probabilities_are_the_models_own(served, lm):
    answer = served.chat(ASKED, max_tokens=6, temperature=3, seed=4, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs.content
    ids = lm.tokens_of(ASKED, 6)
    for one in found:
        with torch.no_grad():
            expected = lm.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        values, _ = expected.topk(3)
        assert [other.logprob for other in one.top_logprobs] == pytest.approx(
            values.tolist(), abs=1e-3
        )
        drawn = min(
            range(len(expected)),
            key=lambda i: (lm.tokenizer.decode([i]) != one.token, abs(expected[i] - one.logprob)),
        )
        assert float(expected[drawn]) == pytest.approx(one.logprob, abs=1e-3)
        assert bytes(one.bytes).decode() == one.token
        ids.append(drawn)


def test_a_seed_draws_what_generate_draws(served, lm):
    def drawn(**options):
        return served.complete(TEXT, max_tokens=16, **options).choices[0].text

    for seed in (0, 7):
        expected = lm.generate(TEXT, tokens=16, temperature=1.5, seed=seed)
        assert TEXT + drawn(temperature=1.5, seed=seed) == expected
    assert drawn(temperature=1.5, seed=0) != drawn(temperature=1.5, seed=7)
    prompt = lm.encode(TEXT)
    for top_p in (0.3, 0.9):
        ids = lm.write(prompt, 16, 1.5, 7, top_p=top_p)
        expected = lm.words(ids[0, prompt.shape[1] :])
        assert drawn(temperature=1.5, seed=7, top_p=top_p) == expected
    # So little of the probability is the top token's.
    assert drawn(temperature=1.5, seed=7, top_p=0) == drawn()


def test_a_text_ends_before_a_stop_sequence(served, lm):
    whole = served.complete(TEXT, max_tokens=24).choices[0].text
    stop = whole[len(whole) // 2 :][:5]
    before = whole[: whole.index(stop)]
    answer = served.complete(TEXT, max_tokens=24, stop=["never written", stop], logprobs=0)
    assert answer.choices[0].text == before
    assert answer.choices[0].finish_reason == "stop"
    assert "".join(answer.choices[0].logprobs.tokens).startswith(before)
    chunks = list(served.complete(TEXT, max_tokens=24, stop=stop, stream=True, logprobs=0))
    assert "".join(one.choices[0].text for one in chunks) == before
    # What it relies on is of the text that was given, and no more.
    count = answer.usage.completion_tokens
    assert lm.explain(TEXT, generate=count).answer.startswith(before)
    assert said(answer.prismlm) == kept(lm.explain(TEXT, generate=count))


def test_nothing_is_written_where_the_text_begins_with_a_stop_sequence(served):
    whole = served.complete(TEXT, max_tokens=8).choices[0].text
    answer = served.complete(TEXT, max_tokens=8, stop=whole[:2])
    assert answer.choices[0].text == ""
    assert answer.prismlm is None


def test_what_is_not_asked_for_is_left_out(served):
    answer = served.chat(ASKED, max_tokens=4, extra_body={"prismlm": False})
    assert not hasattr(answer, "prismlm")
    assert answer.choices[0].message.annotations == []
    few = served.chat(ASKED, max_tokens=4, extra_body={"prismlm": {"documents": 1}})
    assert len(few.prismlm["documents"]) == len(few.prismlm["passages"]) == 1


def post(served, **body):
    return served.client.post("/attributions", body={"model": "tiny", **body}, cast_to=object)


def test_an_answer_of_any_engine_is_attributed(served, lm):
    trace = lm.explain(CHAT)
    for body in ({"messages": CHAT}, {"messages": CHAT[:1], "answer": ANSWER}):
        found = post(served, **body, prismlm={"by": "source"})
        assert said(found["prismlm"]) == kept(trace, "source")
    # A prompt is no part of the answer, which is one of a text of both.
    whole = lm.explain(TEXT + " and then died.")
    found = post(served, prompt=TEXT, answer=" and then died.")
    first = len(lm.tokens_of(TEXT)) - 1
    assert said(found["prismlm"])["shares"] == kept(whole[first:])["shares"]
    assert found["usage"]["prompt_tokens"] == first + 1


def test_sentences_of_the_corpus_are_cited(served, lm):
    """An answer that is a document's own text: annotations lie where its sentences are."""
    documents = lm.lens.cells.documents
    cited = 0
    for number in range(0, 60, 3):
        row = {name: documents[name][number].as_py() for name in ("doc_id", "url", "title")}
        text = lm.lens.corpus.text(number)[:400].rpartition(".")[0] + "."
        found = post(served, messages=[*CHAT[:1], {"role": "assistant", "content": text}])
        for one in found["annotations"]:
            place = one["url_citation"]
            assert one["type"] == "url_citation"
            assert place["url"]
            sentence = text[place["start_index"] : place["end_index"]]
            assert sentence == sentence.strip() != ""
            cited += place["url"] == row["url"]
    assert cited > 5


def refused(kind, code, param, call):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.code == code
    assert caught.value.param == param
    return caught.value.message


def test_what_is_not_served_is_refused_in_openais_form(served, lm):
    def chat(messages=ASKED, **options):
        return lambda: served.chat(messages, max_tokens=2, **options)

    bad, unsupported = openai.BadRequestError, "unsupported_parameter"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    refused(bad, unsupported, "n", chat(n=2))
    refused(bad, unsupported, "tools", chat(tools=[tool]))
    refused(bad, unsupported, "response_format", chat(response_format={"type": "json_object"}))
    refused(bad, unsupported, "frequency_penalty", chat(frequency_penalty=0.5))
    refused(bad, unsupported, "top_k", chat(extra_body={"top_k": 5}))
    refused(bad, None, "stop.constrained-str", chat(stop="a" * 5000))
    message = refused(
        bad,
        "context_length_exceeded",
        "messages",
        lambda: post(served, messages=[*ASKED, {"role": "assistant", "content": "drug " * 600}]),
    )
    assert "1 tokens" not in message
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [{"type": "text", "text": "What is this?"}, image]
    message = refused(
        bad, unsupported, "messages[0].content", chat([{"role": "user", "content": parts}])
    )
    assert "image_url" in message
    refused(
        bad,
        unsupported,
        "messages[0]",
        chat([{"role": "tool", "content": "", "tool_call_id": "1"}]),
    )
    refused(bad, None, "temperature", chat(temperature=-1))
    refused(bad, None, "messages", chat([]))
    refused(bad, unsupported, "prompt", lambda: served.complete(["a", "b"]))
    message = refused(
        openai.NotFoundError,
        "model_not_found",
        "model",
        lambda: served.client.completions.create(model="gpt-4", prompt="a"),
    )
    assert "'tiny'" in message
    long = [{"role": "user", "content": "drug " * 600}]
    refused(bad, "context_length_exceeded", "messages", lambda: served.chat(long))
    endless = "drug " * 200_000
    refused(bad, "context_length_exceeded", "prompt", lambda: served.complete(endless))
    message = refused(
        bad, "context_length_exceeded", "prompt", lambda: served.complete(TEXT, max_tokens=5000)
    )
    assert "asks for 5,000 more" in message
    # What asks for nothing is no reason to refuse.
    text = {"type": "text"}
    nothing = {"temperature": None, "top_p": None, "stop": None, "seed": None, "stream": None}
    same = served.chat(
        ASKED, max_tokens=2, n=1, tools=[], response_format=text, user="me", **nothing
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    assert same.choices[0].message == served.chat(parts, max_tokens=2).choices[0].message


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/chat/completions", b'{"model": "ti', {}, 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, {}, 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", {}, 400),
        ("POST", "/v1/completions", {"model": "tiny"}, {}, 400),
        ("POST", "/v1/completions", b'{"model":"tiny","prompt":"\\ud800"}', {}, 400),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": ""}, {}, 400),
        ("POST", "/v1/attributions", {"model": "tiny"}, {}, 400),
        ("POST", "/v1/attributions", {"model": "tiny", "prompt": "a"}, {}, 400),
        ("POST", "/v1/completions", b"{}", {"Content_Type": "text/plain"}, 415),
        ("POST", "/v1/completions", b"", {"Content_Length": "17000000"}, 413),
        ("GET", "/v1/completions", None, {}, 405),
        ("GET", "/v1/models/other", None, {}, 404),
        ("GET", "/nothing", None, {}, 404),
    ],
)
def test_errors_are_json_in_openais_form(served, method, path, body, headers, status):
    found, text = served.ask(method, path, body, **headers)
    error = json.loads(text)["error"]
    assert found == status, text
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}


def test_models_health_and_metrics(served):
    assert [one.id for one in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").object == "model"
    assert json.loads(served.ask("GET", "/health")[1])["status"] == "ok"
    served.complete(TEXT, max_tokens=3)
    status, text = served.ask("GET", "/metrics")
    assert status == 200
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert float(figures['prismlm_tokens_total{kind="completion"}']) >= 3
    assert float(figures['prismlm_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert float(figures["prismlm_attribution_seconds_count"]) >= 1
    assert float(figures["prismlm_requests_running"]) <= 1


def test_a_key_is_asked_for(chat_model):
    lm = prismlm.load(chat_model)
    with Served(lm, api_key="sesame") as server:
        assert server.complete("a", max_tokens=1).usage.completion_tokens == 1
        wrong = openai.OpenAI(**server.address | {"api_key": "other"})
        with pytest.raises(openai.AuthenticationError, match="API key"):
            wrong.models.list()
        for given in ("Bearer other", "Bearer sesamé", "Bearer", "Basic sesame"):
            assert server.ask("GET", "/v1/models", Authorization=given.encode())[0] == 401
        assert server.ask("GET", "/health")[0] == 200
    for empty in ("", " "):
        with pytest.raises(prismlm.errors.InputError, match="key is empty"):
            create_app(lm, api_key=empty)


def test_a_key_is_asked_for_wherever_the_application_is_mounted(served):
    outer = FastAPI()
    outer.mount("/llm", create_app(served.lm, api_key="sesamé"))
    with TestClient(outer) as client:
        assert client.get("/llm/v1/models").status_code == 401
        key = {"Authorization": "Bearer sesamé".encode()}
        assert client.get("/llm/v1/models", headers=key).status_code == 200
        assert client.get("/llm/health").status_code == 200


def test_a_name_of_another_site_that_points_here_is_refused(served):
    app = create_app(served.lm, hosts=("127.0.0.1", "[::1]"))
    for host, status in [("127.0.0.1", 200), ("[::1]", 200), ("evil.example", 421)]:
        for port in ("", ":8000"):
            client = TestClient(app, base_url=f"http://{host}{port}")
            assert client.get("/v1/models").status_code == status


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [({}, 400, "the body: Field required."), ({"transfer-encoding": "chunked"}, 411, "expected a")],
)
def test_a_body_of_unknown_length_is_refused_and_none_is_said_to_be_missing(
    served, headers, status, words
):
    client = TestClient(create_app(served.lm))
    kind = {"content-type": "application/json"}
    request = client.build_request("POST", "/v1/completions", headers=kind)
    del request.headers["content-length"]
    request.headers.update(headers)
    response = client.send(request)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


def wait_until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("together", [1, 2])
def test_a_full_queue_refuses_and_who_leaves_frees_a_place(chat_model, together):
    lm = prismlm.load(chat_model)
    with unhurried(lm), Served(lm, batch_size=together, max_waiting=1) as server:

        def begin():
            stream = server.complete(TEXT, max_tokens=400, stream=True)
            return stream

        streams = [begin() for _ in range(together)]
        wait_until(lambda: server.engine.running == together)
        waits = begin()
        with pytest.raises(openai.RateLimitError) as caught:
            server.complete(TEXT, max_tokens=1)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        # One that waits leaves, and one that is written.
        waits.close()
        streams.pop().close()
        wait_until(lambda: server.engine.running < together)
        assert server.complete(TEXT, max_tokens=2).usage.completion_tokens == 2
        # And one that does not stream, whose client gives up.
        impatient = openai.OpenAI(**server.address, timeout=0.5)
        with pytest.raises(openai.APITimeoutError):
            impatient.completions.create(model="tiny", prompt=TEXT, max_tokens=400)
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
            post(server, messages=CHAT)
        assert server.ask("GET", "/health")[0] == 409
        # The model itself is still the model.
        plain = server.complete(TEXT, max_tokens=2, extra_body={"prismlm": False})
        assert plain.usage.completion_tokens == 2


def test_an_error_of_the_model_is_told_and_others_are_served(chat_model):
    lm = prismlm.load(chat_model)
    with Served(lm) as server:

        def fails(*_):
            raise RuntimeError("out of memory")

        hook = lm.model.base_model.register_forward_pre_hook(fails)
        with pytest.raises(openai.InternalServerError, match="RuntimeError"):
            server.complete(TEXT, max_tokens=2)
        with pytest.raises(openai.APIError, match="RuntimeError"):
            list(server.complete(TEXT, max_tokens=2, stream=True))
        hook.remove()
        assert server.complete(TEXT, max_tokens=2).usage.completion_tokens == 2


def test_a_model_without_a_lens_is_refused(chat_model, tmp_path):
    model = shutil.copytree(chat_model, tmp_path / "model", ignore=lambda *_: ["lens"])
    with pytest.raises(prismlm.errors.InputError, match="has no lens"):
        Served(prismlm.load(model))


def test_no_request_is_the_servers_fault(served):
    """Whatever the API's own document allows, and what it does not."""
    document = schemathesis.openapi.from_url(f"http://{served.host}/openapi.json")
    routes = [found.ok() for found in document.get_all_operations()]
    assert len(routes) == 7
    said = set()
    for route in routes:

        @settings(
            max_examples=CASES,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        @given(case=route.as_strategy())
        def check(case):
            if isinstance(case.body, dict):
                case.body["model"] = "tiny"
                case.body["max_tokens"] = 3
            response = case.call()
            said.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        check()
    assert {200, 400} <= said
