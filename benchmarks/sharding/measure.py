"""Build, save and load a model of the width of an 8-billion one, of which each process has a share.

    torchrun --nproc-per-node 2 -m benchmarks.sharding.measure

The weights are bfloat16, and so are AdamW's two moments. Peaks are of a process so far. The plan
of the whole model is computed, not measured. Writes docs/results/sharding.json.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import write_json
from prismlm.models.presets import build_config, build_model
from prismlm.training import parallel

SHAPE = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY, BLOCKS = 128_256, 32
# Of a float32 weight, its gradient and AdamW's two moments; of a weight that is gathered in bf16.
TRAINED, GATHERED = 16, 2


def main() -> None:
    """Measure in every process; the first writes the result."""
    parser = script_options(__doc__)
    parser.add_argument("--directory", type=Path, help="for 11 GB")
    arguments = parser.parse_args()
    ranks = in_every_process(measure, arguments.directory)
    if parallel.is_main():
        result = {"plan": plan(), "measured": ranks, "environment": environment()}
        write_json(RESULTS / "sharding.json", result, indent=1)
    parallel.end(0)


def in_every_process(measure: Callable[[Path], Any], parent: Path | None) -> list[Any]:
    """Measure in all processes, with a directory that is removed, and return what each found."""
    torch.set_num_threads(1)
    parallel.join()
    directory = parallel.on_main(lambda: Path(tempfile.mkdtemp(dir=parent)))
    try:
        measured = measure(directory)
    finally:
        parallel.barrier()
        if parallel.is_main():
            shutil.rmtree(directory)
    ranks: list[Any] = [None] * parallel.world_size()
    torch.distributed.all_gather_object(ranks, measured)
    return ranks


def plan() -> dict[str, Any]:
    """Return the parameters of the whole model, and the bytes of a process of 8, 16 and 64."""
    settings = SHAPE | {"num_hidden_layers": BLOCKS}
    with torch.device("meta"):
        model: Any = build_model(build_config(settings, VOCABULARY, 0))
    parameters = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    # FSDP2 gathers the next block during a block; embeddings, norm and W stay until the end.
    gathered = GATHERED * (parameters - (BLOCKS - 2) * block)
    shares = {str(n): TRAINED * parameters // n for n in (8, 16, 64)}
    return {"parameters": parameters, "block": block, "gathered": gathered, "shares": shares}


def measure(directory: Path) -> dict[str, Any]:
    """Return seconds and peaks of each step in this process, and the bytes of its share."""
    steps: dict[str, dict[str, float]] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        outcome = step()
        parallel.barrier()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        steps[name] = {"seconds": time.perf_counter() - start, "peak_bytes": peak}
        return outcome

    config = build_config(SHAPE | {"num_hidden_layers": 1}, VOCABULARY, 0)
    config.dtype = torch.bfloat16
    shards = parallel.Sharding(init_device_mesh("cpu", (parallel.world_size(),)))
    model = timed("build", lambda: shards.build(lambda: build_model(config)))
    timed("shard", lambda: shards.apply(model))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights)
    for p in weights:
        moments = {name: torch.ones_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
    timed("save", lambda: parallel.save_shards(directory / "shards", model, optimizer))
    sums = [p.to_local().sum() for p in weights]
    optimizer.state.clear()
    for p in weights:
        p.detach().to_local().zero_()
    timed("load", lambda: parallel.load_shards(directory / "shards", model))
    state = timed("load_moments", lambda: parallel.load_optimizer(directory / "shards", weights))
    assert [p.to_local().sum() for p in weights] == sums
    assert all(bool((one["exp_avg"].to_local() == 1).all()) for one in state.values())
    timed("write_model", lambda: parallel.save_pretrained(model, directory / "model"))
    share = sum(p.to_local().numel() for p in weights)
    files = {name: list((directory / name).iterdir()) for name in ("shards", "model")}
    return {
        "blocks": 1,
        "parameters": sum(p.numel() for p in weights),
        "share_bytes": 3 * 2 * share,
        "checkpoint_bytes": sum(file.stat().st_size for file in files["shards"]),
        "model_bytes": sum(file.stat().st_size for file in files["model"]),
        "model_files": sum(file.suffix == ".safetensors" for file in files["model"]),
        "steps": steps,
    }


if __name__ == "__main__":
    main()
