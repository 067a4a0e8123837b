"""Options that name a dataset and the columns of texts, for the commands that read them."""

from __future__ import annotations

from typing import Annotated, Any

from prismlm.cli.options import option


def _column(role: str, otherwise: str) -> Any:
    return option("NAME", f"Column of the {role}; {otherwise}.", f"--{role}-column")


Dataset = Annotated[
    str | None,
    option(
        "NAME[:CONFIG]",
        "Stream a Hugging Face dataset, or a local copy of one; json, parquet and the like "
        "are formats of --data-files.",
    ),
]
DatasetConfig = Annotated[
    str | None, option("CONFIG", "The dataset's configuration, or NAME:CONFIG.")
]
DataFiles = Annotated[
    list[str] | None, option("FILE", "Only these files of the dataset; may be repeated.")
]
TextColumn = Annotated[str, _column("text", "in tables and JSON")]
IdColumn = Annotated[str | None, _column("id", "else file-name:row")]
SourceColumn = Annotated[str | None, _column("source", "else the file's name")]
DomainColumn = Annotated[str | None, _column("domain", "else 'domain' if there")]
LicenseColumn = Annotated[str | None, _column("license", "else 'license' if there")]
TitleColumn = Annotated[str | None, _column("title", "else 'title' if there")]
UrlColumn = Annotated[str | None, _column("url", "else 'url' if there")]
SplitColumn = Annotated[
    str | None,
    option(
        "NAME",
        "Column that says train, heldout, validation or test; else 'split' if there; '' for none.",
        "--split-column",
    ),
]
