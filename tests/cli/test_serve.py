import time
from pathlib import Path

import openai

from tests.helpers import forked


def test_it_serves_until_ctrl_c_and_its_port_is_taken(tiny_model, refused):
    options = ("--port", "0", "--name", "tiny", "--api-key", "sesame", "--batch", "2")
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
