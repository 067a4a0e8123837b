"""prismlm inspect index: how far a lens converged, and how varied it is."""

from __future__ import annotations

from typing import Annotated

from prismlm.cli import options as opt
from prismlm.cli.options import flag, load_with_lens
from prismlm.cli.output import print_json, say, show_value

# Rows of the convergence table.
POINTS_SHOWN = 12


def index(
    model: opt.Model,
    lens: opt.Lens = None,
    verify: Annotated[bool, flag("--verify", "Compare the weights with their digests.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show how an index converged, the spread of its documents, and duplicates.

    Every file of the lens is compared with what was written.
    """
    from prismlm.lens.convergence import inspect_lens
    from prismlm.lens.layout import trained_on_words
    from prismlm.models.sidecar import verify_weights

    _, opened = load_with_lens(model, lens)
    inspected = inspect_lens(opened)
    verified = {"weights_verified": verify_weights(model)} if verify else {}
    value = {"model": str(model), "lens": str(opened.path), **verified, **inspected.to_dict()}
    if as_json:
        print_json(value)
        return
    trained = trained_on_words(value["trained_on"], value["split"])
    # Of a long curve some points; of the spread, which each prototype has, quantiles.
    points = value["convergence"]
    step = max(1, -(-len(points) // POINTS_SHOWN))
    value["convergence"] = points[::-1][::step][::-1]
    spread = value["spread"].items()
    value["spread"] = [{"of each prototype": name.replace("_", " ")} | of for name, of in spread]
    verdict, _ = value.pop("verdict"), value.pop("by_prototype")
    show_value(value | {"model trained on them": trained})
    say("Effective number = exp(entropy): equally weighted items with the same spread", style="dim")
    say(verdict)
    if verify and not value["weights_verified"]:
        say("The weights cannot be verified: an older prismlm noted no checksums of them.")
