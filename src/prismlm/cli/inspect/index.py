"""prismlm inspect index: how far a lens converged, and how varied it is."""

from __future__ import annotations

from typing import Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli.options import flag, load_with_lens
from prismlm.cli.output import print_facts, print_json, say, show_rows

# Rows of the convergence table.
POINTS_SHOWN = 12
FACTS = (
    *("tokens", "documents", "prototypes", "with_contexts", "in_use", "contexts"),
    *("distinct_documents", "largest_document_share", "duplicate_share", "near_duplicate_share"),
)


def index(
    model: opt.Model,
    lens: opt.Lens = None,
    verify: Annotated[bool, flag("--verify", "Compare the weights with their digests.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show how an index converged, the spread of its documents, and duplicates.

    Every file of the lens is compared with what was written.
    """
    from prismlm.index.convergence import inspect_lens
    from prismlm.index.layout import trained_on_words
    from prismlm.models.sidecar import verify_weights

    _, opened = load_with_lens(model, lens)
    inspected = inspect_lens(opened)
    verified = {"weights_verified": verify_weights(model)} if verify else {}
    value = {"model": str(model), "lens": str(opened.path), **verified, **inspected.to_dict()}
    if as_json:
        print_json(value)
        return
    trained = trained_on_words(value["trained_on"], value["split"])
    print_facts({name: value[name] for name in FACTS} | {"model trained on them": trained})
    say("")
    _print_tables(value)
    say(value["lens"] + "\n", style="dim")
    say(value["verdict"])
    for files in verified.values():
        say(
            f"{files} files of weights hold what was written"
            if files
            else "The weights cannot be verified: an older prismlm noted no checksums of them."
        )


def _print_tables(value: dict[str, Any]) -> None:
    if value["converged_at"] is not None:
        points = value["convergence"]
        shown = points[::-1][:: -(-len(points) // POINTS_SHOWN)][::-1]
        columns = {"share": ".2%", "tokens": ",.0f", "mean_nearest_cosine": ".4f"}
        title = "Share of the corpus, and how close the nearest place so far is to a prototype"
        at = f"{value['converged_at']:.2%} of the corpus"
        show_rows(title, columns, shown, **{"within 1 % of its last value after": at})
    quantiles = value["spread"]
    columns = {"of each prototype": ""} | dict.fromkeys(next(iter(quantiles.values())), ".1f")
    rows = [{"of each prototype": name.replace("_", " ")} | q for name, q in quantiles.items()]
    show_rows("Effective number = exp(entropy)", columns, rows)
