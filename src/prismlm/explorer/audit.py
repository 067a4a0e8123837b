"""Audits: what a model's predictions over many texts rely on, and the files of the command."""

from __future__ import annotations

from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from prismlm.corpus.documents import Document
from prismlm.corpus.formats import extension
from prismlm.corpus.read import DocumentReader, InputFile
from prismlm.errors import InputError
from prismlm.explain.audit import Audit, write_audit
from prismlm.explain.language_model import PrismLM
from prismlm.explorer.session import Job, SendEvent, Session, saved
from prismlm.outputs import write_text
from prismlm.pages.audit import audit_data, audit_page
from prismlm.pages.frame import rounded

MAX_TEXTS = 1_000


class File(BaseModel):
    """A file as `prismlm audit` reads it, by the extension of its name."""

    name: str = Field(min_length=1, max_length=400)
    content: str


class Files(BaseModel):
    """The files to audit."""

    files: list[File] = Field(min_length=1, max_length=MAX_TEXTS)


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/audits``."""
    router = APIRouter(tags=["audit"])

    @router.post(
        "/audits",
        summary="Audit texts; server-sent events: start, row, done or error",
        response_class=StreamingResponse,
    )
    def audit(body: Files) -> StreamingResponse:
        documents, left_out = _documents(session.lm, body.files, session.limits.audited)
        job = Job(audit=Audit(session.lm))
        session.jobs.add(job.id, job)
        return session.streamed(job, lambda send: _audit(job, documents, left_out, send))

    @router.get("/audits/{key}/report.{kind}", summary="parquet, jsonl, csv or html")
    def report(key: str, kind: Literal["parquet", "jsonl", "csv", "html"]) -> Response:
        job = session.jobs[key]
        if not job.summary:
            raise InputError(f"{key!r} is not an audit that has read a text.")
        return saved(f"audit.{kind}", lambda path: _write(job, path))

    return router


def _documents(
    lm: PrismLM, files: list[File], max_characters: int
) -> tuple[list[Document], dict[str, int]]:
    """Return the texts of files, and how many were left out, by reason."""
    with TemporaryDirectory() as directory:
        names: dict[Path, str] = {}
        for number, file in enumerate(files):
            # The name is untrusted and may point outside the directory.
            path = Path(directory, f"{number}{extension(Path(file.name)) or ''}")
            path.write_bytes(file.content.encode(errors="replace"))
            names[path] = file.name
        try:
            inputs = [InputFile.of(path, name) for path, name in names.items()]
            reader = DocumentReader(inputs, tokenizer=lm.tokenizer, answered_chats="last")
            documents = list(islice(reader, MAX_TEXTS + 1))
        except InputError as error:
            message = str(error)
            for path, name in names.items():
                message = message.replace(str(path), name)
            raise InputError(message.replace(directory, "their folder")) from error
    hint = "Give fewer, or use `prismlm audit`, which has no such limit."
    if len(documents) > MAX_TEXTS:
        raise InputError(f"more than {MAX_TEXTS:,} texts. {hint}")
    characters = sum(len(document.text) for document in documents)
    if characters > max_characters:
        raise InputError(
            f"the texts have {characters:,} characters: the explorer reads {max_characters:,} at "
            f"once. {hint}"
        )
    return documents, dict(reader.left_out)


def _audit(job: Job, documents: list[Document], left_out: dict[str, int], send: SendEvent) -> None:
    """Send the number of texts, each row, and the summary."""
    assert job.audit is not None
    send("start", {"id": job.id, "texts": len(documents)})
    for row in job.audit.read(takewhile(lambda _: not job.stop.is_set(), documents)):
        job.rows.append(row)
        # The page lists only the first of each.
        leading = {name: row[name][:1] for name in ("by_source", "documents")}
        send("row", rounded(row | leading))
    if job.rows:
        job.summary = job.audit.to_dict() | {"left_out": left_out}
    end: dict[str, Any] = {"id": job.id, "stopped": len(job.rows) < len(documents)}
    send("done", end | {"summary": audit_data(job.summary) if job.summary else None})


def _write(job: Job, path: Path) -> None:
    """Write a file as `prismlm audit` writes it."""
    if path.suffix == ".html":
        write_text(path, audit_page(job.summary))
    elif job.audit is not None:
        write_audit(job.rows, [path])
