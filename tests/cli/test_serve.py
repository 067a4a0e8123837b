import time
from pathlib import Path

import httpx
import openai

from tests.helpers import forked


def test_it_serves_until_ctrl_c_and_its_port_is_taken(tiny_model, refused):
    options = ("--port", "0", "--name", "tiny", "--api-key", "sesame", "--batch", "2", "--explorer")
    process = forked.start("serve", tiny_model, *options)
    try:
        said = Path(process.streams.name) / "stderr"
        deadline = time.monotonic() + 60
        while "Ctrl-C" not in said.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        address = said.read_text().splitlines()[0].removeprefix("Serving tiny at ")
        with openai.OpenAI(base_url=address, api_key="sesame", timeout=60) as client:
            answer = client.completions.create(model="tiny", prompt="The drug", max_tokens=3)
        assert answer.prismlm["documents"]
        # The explorer has a key of its own, and so have its routes.
        page = said.read_text().splitlines()[1].removeprefix("Explore it at ")
        with httpx.Client(follow_redirects=True) as browser:
            root = page.partition("?")[0]
            assert browser.get(root).status_code == 401
            assert "<title>" in browser.get(page).text
            overview = browser.get(f"{root}api/model").json()
            shown = browser.get(f"{root}api/answers/{answer.id}").json()
            put = {"model": "tiny", "prompt": "The drug", "max_tokens": 3}
            asked = browser.post(f"{root}api/v1/completions", json=put)
        assert overview["lens"]
        assert overview["name"] == "tiny"
        # It shows what others asked the server, and asks the same way.
        assert shown["answer"] == answer.choices[0].text.strip()
        assert asked.json()["choices"][0]["text"] == answer.choices[0].text
        port = address.rpartition(":")[2].removesuffix("/v1")
        assert f"port {port}" in refused("serve", "no such model", "--port", port)
        process.send_signal(2)
        errors = process.communicate(timeout=20)[1]
        assert process.returncode == 0
        assert errors.endswith("stopped\n")
    finally:
        process.kill()


def test_a_model_without_a_lens_is_told_what_is_missing(tiny_model, tmp_path, refused):
    import shutil

    model = shutil.copytree(tiny_model, tmp_path / "model", ignore=lambda *_: ["lens"])
    assert "has no lens" in refused("serve", model, "--port", 0)
