"""prismlm serve and explore: their addresses, their end, and what they refuse."""

import socket
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

import prismlm
from tests.helpers import forked

HALF_A_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n"
    b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)


@contextmanager
def served(*arguments):
    """Run a command until Ctrl-C, and yield the lines that it prints first."""
    process = forked.start(*arguments)
    try:
        errors, deadline = Path(process.streams.name) / "stderr", time.monotonic() + 60
        while "Ctrl-C" not in errors.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield errors.read_text().splitlines()
        process.send_signal(2)
        end = process.communicate(timeout=20)[1]
        assert end.endswith("stopped\n")
        assert "Traceback" not in end
        assert process.returncode == 0
    finally:
        process.kill()


def test_serve(tiny_model):
    options = ("--port", "0", "--name", "tiny", "--api-key", "sesame", "--batch", "2", "--explorer")
    with served("serve", tiny_model, *options) as lines:
        address = lines[0].removeprefix("Serving tiny at ")
        with openai.OpenAI(base_url=address, api_key="sesame", timeout=60) as client:
            answer = client.completions.create(model="tiny", prompt="The drug", max_tokens=3)
        assert answer.prismlm["documents"]
        # A request that never ends is cut off by Ctrl-C.
        unfinished = socket.create_connection(("127.0.0.1", client.base_url.port))
        unfinished.sendall(HALF_A_REQUEST)
        # The explorer and its routes have a key of their own.
        page = lines[1].removeprefix("Explore it at ")
        root = page.partition("?")[0]
        # An error of the API has its form beside the explorer too.
        with httpx.Client(headers={"Authorization": "Bearer sesame"}) as client:
            errors = client.get(f"{address}/nothing"), client.get(f"{address}/completions")
        assert [error.status_code for error in errors] == [404, 405]
        assert all(error.json()["error"]["message"] for error in errors)
        with httpx.Client(follow_redirects=True) as browser:
            assert browser.get(root).status_code == 401
            assert "<title>" in browser.get(page).text
            overview = browser.get(f"{root}api/model").json()
            shown = browser.get(f"{root}api/answers/{answer.id}").json()
            request = {"model": "tiny", "prompt": "The drug", "max_tokens": 3}
            again = browser.post(f"{root}api/v1/completions", json=request).json()
        assert overview["lens"]
        assert overview["name"] == "tiny"
        # It shows the answers of the server, and uses the same API.
        assert shown["answer"] == answer.choices[0].text.strip()
        assert again["choices"][0]["text"] == answer.choices[0].text
    unfinished.close()


def test_explore_writes_under_a_controller(tiny_model, tmp_path):
    lm, prompt = prismlm.load(tiny_model), "The patient was given a dose of the drug, and the court"
    leading = lm.explain(prompt)[-1].prototypes[:3]
    controller = prismlm.Controller(tuple((use.id, 0.0) for use in leading))
    controller.save(file := tmp_path / "c.safetensors")
    with lm.edit(controller):
        expected = lm.generate(prompt, tokens=5)
    assert expected != lm.generate(prompt, tokens=5)
    options = ("--port", "0", "--no-browser", "--controller", file)
    with served("explore", tiny_model, *options) as lines:
        assert lines[0].startswith(f"Explore {tiny_model.name} at http://127.0.0.1:")
        address = lines[0].split(" at ")[1]
        with httpx.Client(follow_redirects=True, timeout=60) as client:
            client.get(address)
            api = f"{address.partition('?')[0]}api/v1/completions"
            body = {"model": tiny_model.name, "prompt": prompt, "max_tokens": 5, "temperature": 0}
            answer = client.post(api, json=body).json()
    assert prompt + answer["choices"][0]["text"] == expected


def test_a_port_in_use_is_refused_before_anything_is_read(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused("explore", "no such model", "--port", port)
    assert f"port {port}" in message
    assert "--port 0" in message
