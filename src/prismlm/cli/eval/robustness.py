"""prismlm eval robustness, clamping and pairs: what becomes of predictions where a text changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import option
from prismlm.cli.output import print_json, show_rows, show_value, write_json, wrote
from prismlm.outputs import check_outputs
from prismlm.probes.results import Row
from prismlm.probes.results import as_json as as_values

if TYPE_CHECKING:
    from prismlm.eval.robustness import OpenedModel, Pair

Models = Annotated[list[Path], typer.Argument(metavar="MODEL...", help="To compare.")]
Pairs = Annotated[Path, option("FILE", "Pairs of texts, as Parquet, of any slices.")]
Limit = Annotated[int | None, option("N", "Pairs of each slice, drawn by the seed.")]
Entropy = Annotated[float | None, option("E", "Nats (default: the models' lowest).", least=0)]
Sources = Annotated[Path | None, option("DIR", "Of the corpora (default: from the hub).")]
Similarity = Annotated[float, option("C", "The least cosine of a pair.", least=-1, most=1)]


def robustness(
    models: Models,
    pairs: Pairs,
    entropy: Entropy = None,
    limit: Limit = None,
    seed: opt.Seed = 0,
    out: opt.OutJson = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Compare predictions after texts and their variants: Jensen-Shannon divergence and ranks."""
    check_outputs(out, inputs=(*models, pairs), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.robustness import measure_robustness
    from prismlm.run_state import orderly_end

    with orderly_end():
        drawn, how = _drawn(pairs, limit, seed), {"entropy": entropy, "seed": seed}
        found = measure_robustness(_opened(models), drawn, **how, progress=ConsoleReporter())
    value = {"pairs": str(pairs), "limit": limit} | as_values(found)
    if out is not None:
        write_json(out, value)
    print_json(value) if as_json else _print_robustness(found)


def clamping(
    model: opt.Model,
    pairs: Pairs,
    limit: Limit = None,
    seed: opt.Seed = 0,
    out: opt.OutJson = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Read variants with the routing of their originals: does it bring predictions back?"""
    check_outputs(out, inputs=(model, pairs), overwrite=overwrite)
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.clamping import measure_clamping
    from prismlm.run_state import orderly_end

    with orderly_end():
        drawn = _drawn(pairs, limit, seed)
        (opened,) = _opened([model])
        found = measure_clamping(opened, drawn, seed=seed, progress=ConsoleReporter())
    value = {"pairs": str(pairs), "limit": limit} | as_values(found)
    if out is not None:
        write_json(out, value)
    print_json(value) if as_json else _print_clamping(found)


def pairs(
    out: Annotated[Path, option("DIR", "Where the two files of pairs go.")],
    data: Sources = None,
    per_slice: Annotated[int, option("N", "Pairs of each slice.", least=1)] = 500,
    seed: Annotated[int, option("S", "Random seed.", least=0)] = 0,
    similarity: Similarity = 0.75,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Make pairs of sentences that mean the same, and of sentences that do not.

    The pairs are of the corpora's licences, AG News for research only: they do not ship.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.perturbations.generate import FILES, PairOptions, write_pairs
    from prismlm.run_state import orderly_end

    files = [out / name for name in FILES]
    check_outputs(*files, inputs=(data,), overwrite=overwrite)
    options = PairOptions(per_slice=per_slice, seed=seed, similarity=similarity)
    with orderly_end():
        result = write_pairs(out, data, options, ConsoleReporter())
    wrote(*files)
    if as_json:
        print_json(result)
        return
    show_value(result)


def _drawn(path: Path, limit: int | None, seed: int) -> list[Pair]:
    from prismlm.eval.pairs import read_pairs
    from prismlm.eval.robustness import drawn_pairs

    return drawn_pairs(read_pairs(path), limit, seed)


def _opened(paths: Sequence[Path]) -> Iterator[OpenedModel]:
    """Yield models in float32 under the shortest names that tell them apart."""
    from prismlm.eval.robustness import OpenedModel
    from prismlm.models.checkpoint import read_checkpoint

    names = [path.resolve().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        model, tokenizer = read_checkpoint(path)
        unique = name if names.count(name) == 1 else str(path)
        yield OpenedModel(unique, model.float(), tokenizer)


def _print_robustness(found: Row) -> None:
    """Print each slice and model with intervals, then differences to the first model."""
    facts: dict[str, Any] = {
        "mean entropy matched to": found["target"],
        "pairs empty or too long for a model": found["left_out"],
        "JS comparable, over one vocabulary": found["comparable"],
    }
    named = {"name": "", "entropy": ".3f", "temperature": ".3f"}
    show_rows("Models", named, found["models"], **facts)
    first = found["models"][0]["name"]
    rows = [
        {"slice": part["name"], "pairs": part["pairs"], "model": name} | figures
        for part in found["slices"]
        for name, figures in [
            *part["models"].items(),
            *((f"first − {d['of'][1]}", d) for d in part["differences"] if d["of"][0] == first),
        ]
    ]
    figures = ("js", "js_matched", "overlap.value", "spearman.value", "same_top.value")
    columns: dict[str, str] = {"slice": "", "pairs": "", "model": ""}
    columns |= dict.fromkeys(figures, ".3f")
    title = "JS in bits, plain and at matched entropies; 95 % intervals over pairs"
    show_rows(title, columns, rows)


def _print_clamping(found: Row) -> None:
    """Print PMR of each slice with the original's routing and with a random text's."""
    rows = [
        {"slice": part["name"], "routing_of": of} | (part[key] or {"pairs": 0})
        for part in found["slices"]
        for of, key in (("original", "clamped"), ("random text", "control"))
    ]
    columns = {"slice": "", "routing_of": "", "mean": "+.3f", "deviation": ".3f"}
    columns |= {"share_positive": ".3f", "pooled.value": "+.3f", "base.value": ".4f"}
    columns |= {"js.value": ".4f", "pairs": "", "unmoved": ""}
    show_rows(f"PMR: {found['name']}, {found['routing']} clamped", columns, rows)
    columns = dict.fromkeys(("name", "of_equal_length", "unaligned", "below_floor"), "")
    title = "Pairs left out; gain: JS with random routing minus the original's"
    show_rows(title, columns | {"gain": "+.3f"}, found["slices"])
