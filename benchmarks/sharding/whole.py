"""Save a sharded model of 8 billion parameters, and load it into another that is built on meta.

    torchrun --nproc-per-node 2 -m benchmarks.sharding.whole --directory DIR

The shape is Llama 3's, in bfloat16. No process ever holds more than its shards, which are filled
with numbers instead of drawn as for training, and are compared by their digests. The checkpoint has
the weights alone, without an optimizer's state. Peaks are of a process within a step. Writes the
key "model" of docs/results/scale.json.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.index.scale import memory
from benchmarks.sharding.measure import BLOCKS, SHAPE, VOCABULARY, in_every_process
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import read_json, write_json
from prismlm.models.presets import build_config, build_model
from prismlm.training import parallel

TILE = 2**20


def main() -> None:
    """Measure in every process; the first adds the result to the page's figures."""
    parser = script_options(__doc__, RESULTS / "scale.json")
    parser.add_argument("--directory", type=Path, help="for 16 GB")
    arguments = parser.parse_args()
    ranks = in_every_process(measure, arguments.directory)
    if parallel.is_main():
        result = {"blocks": BLOCKS, "processes": ranks, "environment": environment()}
        write_json(arguments.out, read_json(arguments.out) | {"model": result})
    parallel.end(0)


def measure(directory: Path) -> dict[str, Any]:
    """Return the seconds and the peak of each step in this process."""
    steps: dict[str, dict[str, float]] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        parallel.barrier()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        start = time.perf_counter()
        outcome = step()
        seconds = time.perf_counter() - start
        steps[name] = {"seconds": seconds, "peak_bytes": memory("VmHWM")}
        if parallel.is_main():
            print(name, steps[name], flush=True)
        return outcome

    model = timed("build", build)
    timed("fill", lambda: fill(model))
    written = timed("digest", lambda: digests(model))
    parameters = sum(p.numel() for p in model.parameters())
    share = sum(p.to_local().nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    timed("save", lambda: parallel.save_shards(directory, model, optimizer))
    del model, optimizer
    gc.collect()
    other = timed("build_again", build)
    timed("load", lambda: parallel.load_shards(directory, other))
    assert digests(other) == written
    return {
        "parameters": parameters,
        "share_bytes": share,
        "checkpoint_bytes": sum(file.stat().st_size for file in directory.iterdir()),
        "shards": len(written),
        "steps": steps,
    }


def build() -> Any:
    """Return a sharded model, built on meta, whose weights are not set."""
    config = build_config(SHAPE | {"num_hidden_layers": BLOCKS}, VOCABULARY, 0)
    config.dtype = torch.bfloat16
    with init_empty_weights(include_buffers=False):
        model = build_model(config)
    mesh = init_device_mesh("cpu", (parallel.world_size(),))
    for module in (*parallel.blocks(model), model):
        fully_shard(module, mesh=mesh)
    return model._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)


@torch.no_grad()
def fill(model: Any) -> None:
    """Set every shard to numbers that differ by process and by place."""
    tile = torch.randn(TILE, generator=torch.Generator().manual_seed(parallel.rank()))
    tile, count = tile.bfloat16(), 0
    for parameter in model.parameters():
        for part in parameter.to_local().flatten().split(TILE):
            count += 1
            part.copy_(tile.roll(count)[: len(part)])


def digests(model: Any) -> list[str]:
    """Return the digest of each shard of this process."""
    shards = (p.detach().to_local().contiguous() for p in model.parameters())
    return [hashlib.blake2b(shard.view(torch.uint8).numpy()).hexdigest() for shard in shards]


if __name__ == "__main__":
    main()
