from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prismlm
from prismlm.explain.shares import worth_showing
from prismlm.lens.text import Around
from prismlm.pages.trace import fragment, page
from prismlm.pages.trace_data import visible
from tests.helpers.feedback_families import attach_drawn
from tests.helpers.html_reader import Reader
from tests.helpers.lens_meta import change_meta

EVIL = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


@pytest.fixture(scope="module")
def trace(lm):
    return lm.explain("The proof relies on\nthe theory of groups.", generate=3)


@pytest.fixture(scope="module")
def fed_back(tiny_model):
    """The reading of a model with uncertainty feedback."""
    lm = prismlm.load(tiny_model)
    attach_drawn(lm.model, 4096)
    return lm.explain("The proof relies on\nthe theory of groups.", generate=3)


@pytest.fixture(scope="module")
def evil(tiny_model, tmp_path_factory):
    """A model whose lens, from names to addresses, is out to break the page."""
    copy = shutil.copytree(tiny_model, tmp_path_factory.mktemp("evil") / EVIL.replace("/", "_"))
    for name, columns in {
        "index.parquet": ("doc_id", "source", "license", "title", "before", "token", "after"),
        "cell-documents.parquet": ("doc_id", "source", "license", "title"),
        "mass.parquet": ("source", "domain", "license"),
        "prototypes.parquet": ("name", "category"),
    }.items():
        path = copy / "lens" / "sample" / name
        table = pq.read_table(path)
        for column in columns:
            place = table.schema.get_field_index(column)
            table = table.set_column(place, column, pa.array([f"{EVIL}{column}"] * len(table)))
        if "url" in table.column_names:
            urls = pa.array(["javascript:alert(1)"] * len(table))
            table = table.set_column(table.schema.get_field_index("url"), "url", urls)
        pq.write_table(table, path)
    change_meta(copy / "lens" / "sample")
    lm = prismlm.load(copy)
    lm.lens.sentence = lambda position: Around(EVIL, EVIL, EVIL)
    return lm.explain(f"{EVIL} & <b>\u2028")


def test_a_page_shows_every_token_and_where_it_is_from(trace):
    html = page([trace], title="A reading")
    reader = Reader(html)
    tokens = reader.all("span", role="option")
    assert len(tokens) == len(trace)
    assert [int(t["data-step"] or -1) for t in tokens] == list(range(len(trace)))
    assert sum("p-written" in (t["class"] or "") for t in tokens) == 2
    for token, step in zip(tokens, trace, strict=True):
        leading = max(step.prototypes, key=lambda use: use.evidence)
        assert leading.name is not None
        assert leading.name in (token["title"] or "")
        assert f"{step.probability:.1%}" in (token["aria-label"] or "")
    assert "A reading" in reader.text
    assert str(trace.model) in reader.text


def test_what_was_fed_back_is_shown_where_there_is_feedback(fed_back, trace):
    html = page([fed_back])
    reader = Reader(html)
    data, _ = reader.blocks
    assert data["feedback"]
    tokens = reader.all("span", role="option")
    assert "fed" not in data["steps"][0]
    assert fed_back[0].uncertainty_code is None
    assert "fed back: nothing" in (tokens[0]["title"] or "")
    assert "--u:0.000" in (tokens[0]["style"] or "")
    for shown, token, step in list(zip(data["steps"], tokens, fed_back, strict=True))[1:]:
        share, code = shown["fed"]
        assert share == pytest.approx(step.uncertainty, rel=1e-5)
        assert step.uncertainty == pytest.approx(code / 4095)
        assert 0 < code < 4096
        assert f"fed back: uncertainty {share:.0%}, code {code:,}" in (token["aria-label"] or "")
        assert f"--u:{share:.3f}" in (token["style"] or "")
        assert "p-fed" in (token["class"] or "")
    assert "uncertainty fed back to the token" in reader.text

    plain = Reader(page([trace]))
    assert not plain.blocks[0]["feedback"]
    assert not any("fed" in step for step in plain.blocks[0]["steps"])
    assert "uncertainty" not in plain.text
    assert not any("p-fed" in (t["class"] or "") for t in plain.all("span", role="option"))
    # The code is the share in another unit: tables and JSON have the share alone.
    assert "uncertainty_code" not in fed_back[1].to_dict()


def test_parts_in_the_page_sum_to_the_logits(trace):
    data, _ = Reader(page([trace])).blocks
    assert len(data["steps"]) == len(trace)
    for shown, step in zip(data["steps"], trace, strict=True):
        total = sum(use[1] for use in shown["uses"]) + shown["residual"][0] + shown["bias"][0]
        assert total == pytest.approx(step.model_logit, abs=1e-3 * max(1, abs(step.model_logit)))
        assert shown["logit"] == pytest.approx(step.logit, rel=1e-5)
        evidence = sum(use[2] for use in shown["uses"])
        whole = evidence + shown["residual"][1] + shown["bias"][1]
        assert evidence / whole == pytest.approx(step.explained_share, rel=1e-3)


def test_shares_in_the_page_sum_to_one(trace):
    data, _ = Reader(page([trace])).blocks
    groups = [group for step in data["steps"] for group in step["shares"]]
    groups += data["whole"]["shares"]
    assert [group["by"] for group in data["whole"]["shares"]] == [
        "domain",
        "source",
        "license",
    ]
    for group in groups:
        total = sum(share for _, share, _ in group["items"]) + group["others"][1]
        assert total + group["unattributed"] == pytest.approx(1, abs=1e-5)
    first = trace[0:1].sources("domain")
    key, *figures = data["steps"][0]["shares"][0]["items"][0]
    assert key == first.items[0].key
    assert figures == pytest.approx([first.items[0].share, first.items[0].base_rate], rel=1e-5)


def test_quotes_and_what_speaks_against_are_in_the_page(lm):
    text = "".join(lm.lens.corpus.excerpt(int(lm.lens.corpus.starts[i]), 20) for i in (3, 40))
    trace = lm.explain(text)
    data, shared = Reader(page([trace], against=4)).blocks
    whole = data["whole"]
    quotes = trace.verbatim(6)
    assert quotes[0].span.length >= 19
    assert [(q["text"], q["length"], q["count"]) for q in whole["verbatim"]] == [
        (q.text, q.span.length, q.span.count) for q in quotes
    ]
    assert whole["verbatim"][0]["place"]["doc_id"] == quotes[0].places[0]["doc_id"]
    documents = worth_showing(trace.documents(5))
    assert 1 < len(documents) < 5
    # Each document has its own of the first passages, or the place of it that is nearest.
    passages = trace.passages(8)
    pairs = []
    for one, document in zip(whole["documents"], documents, strict=True):
        assert one["share"] == pytest.approx(document.share, rel=1e-5)
        own = [p for p in passages if p.doc_id == document.doc_id]
        assert len(one["passages"]) == max(1, len(own))
        pairs += zip(one["passages"], own, strict=False)
    assert pairs
    for shown, passage in pairs:
        before, token, after, *_ = shared["places"][shown["place"]]
        parts = [part if isinstance(part, list) else [part] for part in (before, after)]
        assert "".join(["".join(parts[0]), token, "".join(parts[1])]) == passage.text
        marked = [piece for pieces in parts for piece in pieces[1::2] if piece]
        assert marked == [passage.text[begin:end] for begin, end in passage.also]
    assert any(passage.also for passage in passages)
    for shown, passage in zip(whole["against"], trace.against(4), strict=True):
        assert shown["share"] == pytest.approx(passage.share, rel=1e-5)
        assert shown["predicted"] == visible(passage.predicted)
        assert shown["probability"] == pytest.approx(passage.probability, rel=1e-5)
        *words, document, position = shared["places"][shown["place"]]
        assert ["".join(word) for word in words] == list(passage.around)
        assert position == passage.position
        assert shared["documents"][document]["doc_id"] == passage.doc_id
    assert "against" not in Reader(page([trace])).blocks[0]["whole"]


def test_a_page_says_the_answer_and_its_support_first(lm):
    trace = lm.explain("The proof relies on", generate=5)
    text = Reader(page([trace])).text
    said = [trace.question, trace.answer.strip(), trace.support.sentence, "Token by token"]
    assert [text.index(one) for one in said] == sorted(text.index(one) for one in said)
    assert str(round(trace.support.score, 2)) not in text


def test_where_nothing_is_about_the_answer_that_comes_first(lm):
    trace = lm.explain("The proof relies on", generate=5)
    support = replace(trace.support, level="none")
    trace.__dict__["support"] = support
    text = Reader(page([trace])).text
    assert text.index(support.sentence) < text.index(trace.answer.strip())


def test_a_lens_without_a_scale_says_so(lm, monkeypatch):
    monkeypatch.setitem(lm.lens.__dict__, "support", None)
    text = Reader(page([lm.explain("The proof relies on", generate=2)])).text
    assert "is not known: the lens has no scale of support" in text


def test_an_empty_answer_is_said_to_be_empty(lm, monkeypatch):
    trace = lm.explain("The proof relies on", generate=1)
    monkeypatch.setattr(type(trace), "answer", property(lambda _: " "))
    assert "The model wrote nothing." in Reader(page([trace])).text


def test_contexts_are_the_index_and_held_once(trace):
    _, shared = Reader(page([trace, trace])).blocks[1:]
    assert shared == Reader(page([trace])).blocks[-1]
    for name in ("places", "documents"):
        listed = [json.dumps(one) for one in shared[name]]
        assert len(set(listed)) == len(listed) > 0
    index = trace.lens.index
    carrying = {
        use.id
        for step in trace
        for use in sorted(step.prototypes, key=lambda use: -abs(use.contribution))[:6]
    }
    assert {int(number) for number in shared["prototypes"]} == {
        use.id for step in trace for use in step.prototypes
    }
    shown = {n: one[3] for n, one in shared["prototypes"].items() if len(one) == 4}
    assert {int(number) for number in shown} == carrying
    assert len(shown) < len(shared["prototypes"])
    for number, contexts in shown.items():
        rows = trace.lens.rows_of(int(number))
        count = min(3, rows.stop - rows.start)
        nearest = index.slice(rows.start, count).to_pylist()
        for row, place in zip(nearest, contexts, strict=True):
            before, token, after, document, position = shared["places"][place]
            assert position == row["position"]
            assert (before, token, after) == (row["before"][-60:], row["token"], row["after"][:48])
            known = shared["documents"][document]
            assert all(known[key] == row[key] for key in ("doc_id", "source", "license", "title"))


def test_traces_of_two_lenses_share_nothing(trace):
    other = replace(trace, model="another")
    blocks = Reader(page([trace, trace[:2], other[:2]])).blocks
    assert ["prototypes" in block for block in blocks] == [False, False, True, False, True]


def test_characters_of_several_tokens_are_whole(lm):
    trace = lm.explain("Go to 東京 now 🤖.")
    html = page([trace])
    reader = Reader(html)
    assert "\ufffd" not in reader.text
    # In the text and at its first token.
    assert all(reader.text.count(letter) == 2 for letter in "東京🤖")
    data, _ = reader.blocks
    shown = [step["token"] for step in data["steps"]]
    assert not any("\ufffd" in token for token in shown)
    pieces = [step.pieces[0] for step in trace]
    assert "".join(piece.shown for piece in pieces) == "Go to 東京 now 🤖."
    (several, *_) = [piece for piece in pieces if piece.of > 1]
    assert several.label == f"{several.text} {several.number}/{several.of}"
    assert any(several.label in token for token in shown)


@pytest.mark.parametrize("mark", ["\u202e", "\u2066", "\u2067", "\u061c", "\u200f"])
def test_marks_of_direction_are_shown_and_turn_nothing(lm, mark, monkeypatch):
    around = Around(f"a{mark}b", f" {mark}c", f"d{mark}")
    monkeypatch.setattr(lm.lens, "sentence", lambda position: around)
    names = [f"cat{mark}egory" for _ in lm.lens.names]
    monkeypatch.setitem(lm.lens.__dict__, "names", names)
    trace = lm.explain(f"The proof {mark}relies on")
    code = f"‹U+{ord(mark):04X}›"
    for html in (page([trace], title=f"A {mark}title"), fragment(trace)):
        assert mark not in html
        reader = Reader(html)
        assert f"cat{code}egory" in html
        assert code in reader.text
        assert [f"a{code}b", f" {code}c", f"d{code}"] in [p[:3] for p in reader.blocks[1]["places"]]
    assert f"<title>A {code}title</title>" in page([trace], title=f"A {mark}title")


def test_nothing_in_a_text_or_corpus_becomes_markup(evil):
    html = page([evil], title=EVIL)
    reader = Reader(html)
    assert len(reader.scripts) == 1
    assert "alert" not in reader.scripts[0]
    assert len(reader.blocks) == 2
    assert len(reader.all("script")) == 3
    assert reader.all("b") == []
    assert reader.all("a") == []
    assert html.count("<script") == html.count("</script") == 3
    assert "\u2028" not in html
    documents = reader.blocks[1]["documents"]
    assert all(document["url"] is None for document in documents)
    # What was escaped is still there to be read.
    assert all(document["title"] == f"{EVIL}title" for document in documents)
    assert EVIL in reader.text


def test_a_page_requests_nothing(trace):
    html = page([trace])
    reader = Reader(html)
    (policy,) = reader.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert (policy["content"] or "").startswith("default-src 'none'")
    assert not [a for _, a in reader.elements if "src" in a or "href" in a]
    script = "".join(reader.scripts)
    assert not re.search(r"fetch\(|XMLHttpRequest|import|innerHTML|eval|url\(", script)
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"url\(|@import", style)


def test_ids_on_one_page_do_not_clash(lm, trace):
    other = lm.explain("Another text")
    html = page([trace, other, trace]) + fragment(other[:1])
    ids = [attributes["id"] for _, attributes in Reader(html).elements if "id" in attributes]
    assert len(ids) == 8
    assert len(set(ids)) == len(ids)
    controlled = [a["aria-controls"] for a in Reader(html).all("div", role="listbox")]
    assert set(controlled) < set(ids)


def test_a_fragment_stands_alone_and_repeats_itself(trace):
    assert fragment(trace) == trace._repr_html_() == fragment(trace)
    reader = Reader(fragment(trace))
    assert not reader.all("html")
    assert len(reader.scripts) == 1
    assert len(reader.blocks) == 2


def test_without_a_lens_there_are_no_shares(trace):
    bare = replace(trace, lens=None)
    data, shared = Reader(page([bare])).blocks
    assert data["whole"] is None
    assert shared["places"] == []
    assert all(step["shares"] == [] for step in data["steps"])


def test_a_trace_without_steps(trace):
    assert "no steps" in Reader(page([trace[:0]])).text


@pytest.mark.slow
def test_in_a_browser(trace, evil, fed_back, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page([trace, evil, fed_back], against=2), encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "this test needs chromium"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [
        chromium,
        *flags,
        f"--user-data-dir={tmp_path / 'user'}",
        "--dump-dom",
        path.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=60)
    reader = Reader(dom.stdout)
    last = trace[-1]
    # All panels are on their last token, with every prototype of it: five rows, and one that opens.
    assert len(reader.all("article", **{"data-ready": "yes"})) == 3
    assert len(reader.all("span", **{"aria-selected": "true"})) == 3
    used = sum(len(one[-1].prototypes) for one in (trace, evil, fed_back))
    rest = [max(0, len(one[-1].prototypes) - 5) for one in (trace, evil, fed_back)]
    folded = sum(one.support.level == "none" for one in (trace, evil, fed_back))
    assert len(reader.all("details")) == used + 3 + sum(map(bool, rest)) + folded
    assert all(f"{number} more" in reader.text for number in rest if number)
    # Of one trace out of three.
    assert reader.text.count("fed back, code") == 1
    assert f"fed back, code {fed_back[-1].uncertainty_code:,}" in reader.text
    assert f"{last.logit:.3f}".replace("-", "−") in reader.text
    assert "not traced" in reader.text
    # A block for each trace, one for what those of a lens share, and the script.
    assert len(reader.all("script")) == 3 + 3 + 1
    for one in (trace, evil, fed_back):
        for passage in one.against(2):
            assert f"instead of {visible(passage.predicted)}, to which the model" in reader.text
    quote = max(trace.verbatim(6), key=lambda quote: quote.span.length, default=None)
    spans = sum(len(one.verbatim(6)) for one in (trace, evil, fed_back))
    assert len(reader.all("q")) == spans
    assert quote is None or f"{quote.span.length} tokens" in reader.text
