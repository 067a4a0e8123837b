"""An application on a real port of loopback, and a real browser that looks at pages."""

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings


class Running:
    """A running application, made for the host and port that it listens at."""

    def __init__(self, make_app, headers=None):
        self.headers = headers or {}
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self.app = make_app(self.host)
        config = uvicorn.Config(self.app, log_level="critical", timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, method, path, body=None, headers=None):
        """Return status, headers and body of a request; a body that is no bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {} if data is None else {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self.host, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, data, self.headers | sent | (headers or {}))
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()


def assert_never_at_fault(running, cases=8):
    """Send whatever the API's own document allows, and what it does not; return the routes."""
    import schemathesis

    document = schemathesis.openapi.from_url(
        f"http://{running.host}/openapi.json", headers=running.headers
    )
    routes, statuses = [route.ok() for route in document.get_all_operations()], set()
    for route in routes:

        @settings(
            max_examples=cases,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        @given(case=route.as_strategy())
        def check(case):
            response = case.call(headers=running.headers)
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]

        check()
    assert {200, 400} <= statuses
    return routes


_open = contextlib.ExitStack()
_browsers = []


@pytest.fixture
def browser():
    """Chromium, open until a test follows that is of another folder.

    Two of Playwright's do not go together in one process, nor does one with ``asyncio.run``.
    """
    if not _browsers:
        _browsers.append(_open.enter_context(chromium()))
        _open.callback(_browsers.clear)
    return _browsers[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path.parent.name not in ("explorer", "pages"):
        _open.close()


@contextlib.contextmanager
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--enable-unsafe-swiftshader"],
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def new_page(browser, **options):
    """An empty page, in a context of its own; an error in the scripts of what it shows fails."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(error))
    yield page
    context.close()
    assert errors == []


def assert_fits_a_phone(page):
    """A phone scrolls in one direction only."""
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@contextlib.contextmanager
def slowed(lm):
    """Slow a model down as larger ones are, and let it never end its text by itself.

    So small a one is done before a browser on a busy machine can do anything about it.
    """
    own = lm.model.generation_config.eos_token_id
    hook = lm.model.base_model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    lm.model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        hook.remove()
        lm.model.generation_config.eos_token_id = own


def problems(page, *rules):
    """Return what it objects to, as lines, by all rules or the named ones."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": {"type": "rule", "values": rules}} if rules else None
    found = Axe().run(page, options=options).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]


def assert_accessible(page):
    """It objects to nothing, and the page has enough contrast in the dark too."""
    # The other rules look at no colour.
    for scheme, rules in (("dark", ["color-contrast"]), ("light", [])):
        page.emulate_media(color_scheme=scheme)
        assert problems(page, *rules) == []
