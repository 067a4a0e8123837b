"""A real browser that opens a page as a file, and sees that it asks for nothing else."""

import contextlib

import pytest

from tests.helpers.running import browser, new_page, pytest_runtest_teardown

__all__ = ["browser", "pytest_runtest_teardown"]


@pytest.fixture
def opened(browser, tmp_path):
    """What opens HTML in a tab; an error in its scripts, or a request, fails the test."""

    @contextlib.contextmanager
    def tab(html, fragment=""):
        path, errors, requests = tmp_path / "page.html", [], []
        path.write_text(html, encoding="utf-8")
        with new_page(browser) as page:
            page.on("console", lambda said: said.type == "error" and errors.append(said.text))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(path.as_uri() + fragment)
            yield page
        assert errors == []
        assert {url.partition("#")[0] for url in requests} == {path.as_uri()}

    return tab
