"""What the heads of a model do over a text, as one report."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prismlm.corpus.sequences import CorpusPart, Sequences
from prismlm.errors import InputError
from prismlm.files import atomic_file, finite
from prismlm.instruments.heads.comparison import Comparison, compare_groups
from prismlm.instruments.heads.head_use import LEAST_VISIBLE, HeadUses, head_uses
from prismlm.models.positions import check_window
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class HeadReport:
    """The heads of one model over a text.

    Attributes:
        model: its name.
        corpus: what was read.
        uses: what each head does.
        comparison: signal against noise heads, or None in a model whose heads are of one kind.
    """

    model: str
    corpus: CorpusPart
    uses: HeadUses
    comparison: tuple[Comparison, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not a number is None."""
        return finite(asdict(self))


def head_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    layers: Sequence[int] | None = None,
    least_visible: int = LEAST_VISIBLE,
    progress: Reporter = SILENT,
) -> HeadReport:
    """Return what each head does over a text, and how signal and noise heads differ.

    Raises:
        InputError: as :func:`head_uses`, or a split without documents.
    """
    check_window(model, sequences.length)
    check_text(sequences)
    if sequences.length < least_visible:
        raise InputError(
            f"windows of {sequences.length} tokens, of which no token sees {least_visible} tokens: "
            "read longer windows, or count queries that see fewer."
        )
    uses = head_uses(
        model, sequences.batches(), layers=layers, least_visible=least_visible, progress=progress
    )
    mixed = {head.group for head in uses.heads} == {"signal", "noise"}
    comparison = compare_groups(uses) if mixed else None
    return HeadReport(name, sequences.part(uses.tokens), uses, comparison)


def write_heads(reports: Sequence[HeadReport], path: str | os.PathLike[str]) -> None:
    """Write one CSV row a head: model, layer, head, group, its figures and its spectrum.

    Columns of the spectrum are named by the distances of their bin, as ``share_3_4``. The row of
    uniform attention has the group "uniform" and no layer.
    """
    bins = max((report.uses.bins for report in reports), key=len)
    names = [f"share_{low}" if low == high else f"share_{low}_{high}" for low, high in bins]
    with (
        atomic_file(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        figures = [key for key in asdict(reports[0].uses.uniform) if key != "spectrum"]
        columns = ["model", "layer", "head", "group", *figures, *names]
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for report in reports:
            rows = [asdict(report.uses.uniform) | {"group": "uniform"}]
            rows += [asdict(head) for head in report.uses.heads]
            for row in rows:
                shares = dict(zip(names, row.pop("spectrum"), strict=False))
                writer.writerow({"model": report.model, **row, **shares})


def check_text(sequences: Sequences) -> None:
    """Raise InputError if the split has no documents."""
    if not sequences.tokens:
        raise InputError(
            f"the corpus {sequences.corpus.name!r} has no documents in {sequences.split!r}: take "
            "another split, or build it with a larger --heldout share."
        )
