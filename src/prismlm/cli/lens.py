"""prismlm index, label, map, push and export: a lens is built, named, laid out and shared."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prismlm.lens.lens import Lens
    from prismlm.probes.results import Row

MAX_EXAMPLES = 12
# Balanced accuracy; 0.5 is chance.
CHANCE_ACCURACY = 0.55
FOREIGN = (
    "By their words alone these names do not tell where a prototype fires: they may be in another "
    "language than the corpus. To go back, run `prismlm label --overwrite` without an endpoint.\n"
)
MostUsed = Annotated[int | None, option("N", "Ask only about the N with the most text.", min=0)]
Window = Annotated[int | None, option("N", "Tokens read at once (default: as in training).", min=1)]
WithText = Annotated[bool, flag("--text/--no-text", "Store the text of contexts, or only offsets.")]
Private = Annotated[bool, flag("--private", "Only its owners see it; a public one is refused.")]
Licenses = Annotated[list[str] | None, option("NAME", "Licence that allows sharing; repeatable.")]
PushDryRun = Annotated[bool, flag("--dry-run", "Print the card and file names; upload nothing.")]
FORMAT_HELP = "sae-lens: for SAE.load_from_disk. neuronpedia: for an importer of your own."


def index(
    model: opt.Model,
    corpus: Annotated[Path, option("DIR", "The corpus.")],
    lens: Annotated[str | None, option("NAME|DIR", "Default: the corpus's name.")] = None,
    contexts: opt.Contexts = 64,
    window: Window = None,
    stride: opt.Stride = None,
    split: opt.Split = "train",
    text: WithText = True,
    positions: opt.PositionShare = 1.0,
    codes: opt.Codes = "int8",
    shard: opt.Part = None,
    parts: opt.PartCount = None,
    workers: opt.Workers = None,
    engine: opt.Engine = "local",
    device: opt.Device = "auto",
    precision: opt.Precision = "auto",
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> None:
    """Find the text each prototype stands for, so that explain can point to it.

    Finished parts are kept: run again to resume. Under torchrun every process reads one part.
    """
    from prismlm.corpus import Corpus
    from prismlm.lens import build
    from prismlm.lens.cells import check_codes
    from prismlm.lens.lens import lens_summary
    from prismlm.lens.options import IndexOptions, Shard, options_for
    from prismlm.models.checkpoint import load_checkpoint
    from prismlm.models.device import device_named, uses_bf16

    source = Corpus.open(corpus)
    place, part = _local_device(device_named(device)), Shard(*opt.parse_shard(shard))
    count = opt.count_parts(parts, workers, engine, shard)
    sizes = (contexts, window or 0, stride or 0, split, text, positions, check_codes(codes))
    options = IndexOptions(*sizes, bf16=uses_bf16(precision, place), shard=part)
    out = build.lens_directory(model, lens or source.name)
    build.check_lens(out, overwrite=overwrite)
    if dry_run:
        checkpoint = load_checkpoint(model, device=place)
        options = options_for(checkpoint.model, options, model)
        head = checkpoint.sidecar.head
        cost = build.estimate_index(checkpoint.model, head, source, options)
        return output.show_cost(cost, as_json)
    start = time.monotonic()
    how: dict[str, Any] = {"progress": output.progress()}
    if count:
        one = build.IndexPart(model, source.path, out, options, device, overwrite)
        written = build.index_in_parts(one, count, engine=engine, workers=workers or 1, **how)
    else:
        how |= {"device": place, "overwrite": overwrite}
        written = build.index(model, source, out, options, **how)
    if written is not None:
        seconds = round(time.monotonic() - start, 1)
        output.show({"lens": str(out), **lens_summary(out), "seconds": seconds}, as_json)
    elif "WORLD_SIZE" not in os.environ:
        output.show_part("lens", out, part.number, part.count, as_json)


def _local_device(name: str) -> str:
    """Return the GPU of this process where several read one part each."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if name == "cuda" and rank else name


def label(
    model: opt.Model,
    lens_name: opt.Lens = None,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    prototypes: MostUsed = None,
    concurrency: Annotated[int, option("N", "Concurrent questions.", min=1)] = 8,
    timeout: Annotated[float, option("SECONDS", "Timeout of a question.", min=0.001)] = 120.0,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Name the prototypes of a lens from the text where they fire, and score the names.

    With --endpoint a language model names them. Run again to resume.
    """
    server = opt.open_endpoint(endpoint, endpoint_model, concurrency, timeout)
    if server is None and prototypes is not None:
        raise InputError("--prototypes goes with --endpoint URL.")
    from prismlm.lens.labels.write import ask_for_names, label_lens

    lm, lens = opt.open_with_lens(model, lens_name)
    ask = server and partial(ask_for_names, endpoint=server, prototypes=prototypes)
    settings: dict[str, Any] = {"overwrite": overwrite, "labeller": ask}
    summary = label_lens(lens, lm.model, **settings, progress=output.progress())
    value = {"model": str(model), "lens": lens.address, **summary}
    output.show(value, as_json, _named(lens, value))


def _named(lens: Lens, value: Row) -> Iterator[Any]:
    yield f"{value['named']:,} of {value['prototypes']:,} prototypes named\n"
    yield value
    yield "\nDetection and fuzzing: balanced accuracy by words alone; 50 % is chance.\n"
    scores = value["asked"]["scores"]["own"].values() if value["asked"] is not None else ()
    means = [score["mean"] for score in scores if score is not None]
    if means and max(means) < CHANCE_ACCURACY:
        yield output.warning(FOREIGN)
    # Examples, evenly spaced from common to rare prototypes.
    rows, order = lens.prototypes.to_pylist(), lens.by_size.tolist()
    used = [rows[number] for number in order if rows[number]["usage"] > 0]
    examples = used[:: max(1, len(used) // MAX_EXAMPLES)][:MAX_EXAMPLES]
    yield output.table("Examples", "prototype name category label_score:.0%", examples)


def map_prototypes(
    model: opt.Model,
    lens_name: opt.Lens = None,
    html: Annotated[Path | None, option("FILE", "Write an interactive page.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Lay out the prototypes of a lens in two dimensions, and show them with their names."""
    from prismlm.lens.labels.map import map_lens, regions
    from prismlm.lens.layout import find_lens
    from prismlm.lens.store import files_of
    from prismlm.outputs import write_text
    from prismlm.pages.prototype_map import prototype_map_page

    opt.check_output_files(model, overwrite=overwrite, html=html)
    address = find_lens(model, lens_name)
    if overwrite or address is None or files_of(address).read_meta().map is None:
        opt.require_packages("umap")
    lm, lens = opt.open_with_lens(model, lens_name)
    if lens.meta.map is None or overwrite:
        map_lens(lens, lm.head, progress=output.progress())
    title = f"Prototypes of {model.name}"
    output.write(html, lambda path: write_text(path, prototype_map_page(lens, title)))
    value = {"model": str(model), "lens": lens.address, **(lens.meta.map or {})}
    value["regions"] = [{"x": x, "y": y, "name": name} for x, y, name in regions(lens)]
    output.show(value, as_json)


def push(
    model: opt.Model,
    name: Annotated[str, argument("ORG/NAME", "Its name on the hub.")],
    lens: opt.Lens = None,
    private: Private = False,
    no_lens: Annotated[bool, flag("--no-lens", "Leave out the lens, and so all text.")] = False,
    allow_license: Licenses = None,
    dry_run: PushDryRun = False,
) -> None:
    """Upload a model with its lens and a card to the Hugging Face Hub."""
    options: dict[str, Any] = {"private": private, "with_lens": not no_lens, "dry_run": dry_run}
    options["allow_licenses"] = allow_license or ()
    pushed = opt.open_model(model, lens).push_to_hub(name, **options)
    typer.echo(f"{pushed.card}\nFiles: {', '.join(pushed.files)}" if dry_run else pushed.url)


def export(
    model: opt.Model,
    out: Annotated[Path, argument("DIR", "A new directory.")],
    to: Annotated[Literal["sae-lens", "neuronpedia"], option("FORMAT", FORMAT_HELP)],
    lens: opt.Lens = None,
) -> None:
    """Write the prototypes for SAELens, or their cards for Neuronpedia."""
    from prismlm.explain.exports import export_neuronpedia, export_sae_lens

    lm = opt.open_model(model, lens)
    (export_sae_lens if to == "sae-lens" else export_neuronpedia)(lm, out)
    typer.echo(str(out))
