"""A real server with the tiny model, and a real browser that looks at it."""

import contextlib
import json

import pytest

import prismlm
from prismlm.explorer import create_app
from prismlm.explorer.session import Limits
from tests.helpers.lens_files import named_model
from tests.helpers.running import Running, browser, new_page, pytest_runtest_teardown, slowed

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

    def text(self, method, path, body=None, expected=200):
        """Return the text of a response, which must have this status."""
        status, _, data = self.ask(method, path, body)
        assert status == expected, data
        return data.decode()

    def json(self, method, path, body=None):
        """Return the JSON of a request that must succeed."""
        return json.loads(self.text(method, path, body))

    def refused(self, method, path, body=None, expected=400):
        """Return the error of a request that must be refused."""
        return json.loads(self.text(method, path, body, expected))["error"]

    def write(self, prompt, tokens):
        """Return the response to a text, or to a question if it is a list of messages."""
        chat = not isinstance(prompt, str)
        path = "/api/v1/chat/completions" if chat else "/api/v1/completions"
        put = {"messages": list(prompt)} if chat else {"prompt": prompt}
        return self.json("POST", path, put | {"model": self.name, "max_tokens": tokens})

    def shown(self, key, more=""):
        """Return what the page shows of an answer, by its id."""
        return self.json("GET", f"/api/answers/{key}{more}")

    def answer(self, prompt, tokens):
        """Return what the page shows of the answer to a text or to messages."""
        return self.shown(self.write(prompt, tokens)["id"])

    def events(self, path, body):
        """Return the server-sent events of a request, as pairs of name and data."""
        blocks = self.text("POST", path, body).strip().split("\n\n")
        pairs = (block.removeprefix("event: ").split("\ndata: ", 1) for block in blocks)
        return [(name, json.loads(data)) for name, data in pairs]


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
def visited(browser, served):
    """A page of the explorer, opened with its key."""
    with new_page(browser) as page:
        page.goto(served.address)
        page.wait_for_selector(".x-nav a")
        yield page


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
