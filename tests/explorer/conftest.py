"""A real server with the tiny model, and a real browser that looks at it."""

import contextlib
import json

import pytest

import prismlm
from prismlm.explorer import create_app
from prismlm.explorer.session import Limits
from tests.helpers.named_lens import named_model
from tests.helpers.running import Running, browser, pytest_runtest_teardown, slowed

__all__ = ["browser", "pytest_runtest_teardown"]
TOKEN = "the-key-of-this-run"
HOSTILE = '<img src=x onerror="document.title=1"> \u202egnp'
PROMPTS = {"medicine": "The symptoms of this disease in patients include"}
QUESTIONS = {"medicine": "What does this disease do?"}
TEXT = "The patient was given a dose of the drug"


class Served(Running):
    """A running explorer, asked with its key."""

    def __init__(self, lm, **limits):
        options = {"prompts": PROMPTS, "questions": QUESTIONS, "limits": Limits(**limits)}
        super().__init__(
            lambda host: create_app(lm, token=TOKEN, hosts=frozenset({host}), **options),
            {"Authorization": f"Bearer {TOKEN}"},
        )
        self.lm, self.name = lm, lm.path.resolve().name
        self.address = f"http://{self.host}/?token={TOKEN}"

    def refused(self, method, path, body=None, expected=400):
        """Return the error of a request that must be refused."""
        status, _, data = self.ask(method, path, body)
        assert status == expected, data
        return json.loads(data)["error"]

    def json(self, method, path, body=None):
        """Return the JSON of a request that must succeed."""
        status, _, data = self.ask(method, path, body)
        assert status == 200, data
        return json.loads(data)

    def write(self, prompt, tokens, **more):
        """Return the response to a text, or to a question if it is a list of messages."""
        chat = not isinstance(prompt, str)
        path = "/api/v1/chat/completions" if chat else "/api/v1/completions"
        put = {"messages": list(prompt)} if chat else {"prompt": prompt}
        return self.json("POST", path, put | {"model": self.name, "max_tokens": tokens} | more)

    def answer(self, prompt, tokens):
        """Return what the page shows of the answer to a text or to messages."""
        return self.json("GET", f"/api/answers/{self.write(prompt, tokens)['id']}")

    def events(self, path, body=None):
        """Return the server-sent events of a request, as pairs of name and data."""
        status, _, data = self.ask("GET" if body is None else "POST", path, body)
        assert status == 200, data
        blocks = (block.split("\n", 1) for block in data.decode().strip().split("\n\n"))
        return [
            (n.removeprefix("event: "), json.loads(d.removeprefix("data: "))) for n, d in blocks
        ]


def texts_of(rows):
    """Return rows of texts or chats as the body of an audit."""
    content = "\n".join(json.dumps(row) for row in rows)
    return {"files": [{"name": "texts.jsonl", "content": content}]}


@pytest.fixture
def slow_model(served):
    """The served model is :func:`slowed` during the test."""
    with slowed(served.lm):
        yield


@pytest.fixture(scope="session")
def served(tiny_model):
    with Served(prismlm.load(tiny_model)) as server:
        yield server


@pytest.fixture(scope="module")
def lm(served):
    return served.lm


@pytest.fixture(scope="session")
def named(tiny_model, tmp_path_factory):
    """A server of a model whose prototypes have names, categories and a map; it reads 60 tokens."""
    directory = tmp_path_factory.mktemp("named") / "model"
    with Served(named_model(tiny_model, directory, first=HOSTILE), tokens=60) as server:
        yield server


@contextlib.contextmanager
def visited(browser, served, **options):
    """A page of the explorer, opened with its key; an error in its scripts fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(served.address)
    page.wait_for_selector(".x-nav a")
    yield page
    context.close()
    assert errors == []


@pytest.fixture
def page(browser, served):
    with visited(browser, served) as opened:
        yield opened


def go(page, address):
    """Open another view."""
    page.evaluate("address => { location.hash = address }", f"#/{address}")


def ask(page, text=TEXT, tokens=6):
    """Ask for so many tokens, and unfold them once they have come."""
    page.fill(".x-prompt", text)
    page.fill("label:has-text('tokens') input", str(tokens))
    page.press(".x-prompt", "Enter")
    unfold(page)


def unfold(page):
    """Unfold the tokens of the answer that has come."""
    page.wait_for_selector(".x-exports")
    if not page.locator(".p-tokens[open]").count():
        page.click(".p-tokens > summary")


def assert_fits_a_phone(page):
    """A phone scrolls in one direction only."""
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
