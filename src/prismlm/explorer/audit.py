"""Audits: what a model's predictions over many texts rely on, and the files of the command."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from prismlm.corpus.documents import Document
from prismlm.corpus.formats import extension
from prismlm.corpus.read import DocumentReader, InputFile
from prismlm.errors import InputError, check_text
from prismlm.explain.audit import Audit, audit_files
from prismlm.explain.language_model import PrismLM
from prismlm.explain.texts import document_ids, text_options
from prismlm.explorer.session import Job, Session, Tell, attachment
from prismlm.pages.audit import audit_data, audit_page
from prismlm.pages.frame import rounded

MOST_TEXTS = 1_000
KINDS = {
    "parquet": "application/vnd.apache.parquet",
    "jsonl": "application/jsonl; charset=utf-8",
    "csv": "text/csv; charset=utf-8",
    "html": "text/html; charset=utf-8",
}


class File(BaseModel):
    """A file as `prismlm audit` reads it; the ending of its name says how."""

    name: str = Field(min_length=1, max_length=400)
    content: str


class Files(BaseModel):
    """What is to be audited."""

    files: list[File] = Field(min_length=1, max_length=MOST_TEXTS)


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/audits``."""
    router = APIRouter(tags=["audit"])

    @router.post(
        "/audits",
        summary="Audit texts; server-sent events: start, progress, row, done or error",
        response_class=StreamingResponse,
    )
    def audit(sent: Files) -> StreamingResponse:
        documents, left_out = _documents(session.lm, sent.files, session.limits.audited)
        found = Audit(session.lm, text_options([session.lm]))
        job = Job(audit=found)
        session.jobs.add(job.id, job)
        return session.streamed(
            job, lambda tell: _read(session.lm, job, found, documents, left_out, tell)
        )

    @router.get("/audits/{key}/report.{kind}", summary="parquet, jsonl, csv or html")
    async def report(key: str, kind: str) -> Response:
        job = session.jobs[key]
        if not job.summary:
            raise InputError(f"{key!r} is not an audit that has read a text.")
        if kind not in KINDS:
            raise InputError(f"there is no report of kind {kind!r}: expected {', '.join(KINDS)}.")
        data = await run_in_threadpool(lambda: _report(job, kind))
        return attachment(data, f"audit.{kind}", KINDS[kind])

    return router


def _documents(lm: PrismLM, files: list[File], most: int) -> tuple[list[Document], dict[str, int]]:
    """Return the texts that the command reads of files, and how many were left out, by why."""
    with TemporaryDirectory() as directory:
        named: list[InputFile] = []
        for number, file in enumerate(files):
            # A name that was sent is no path: it may lead out of the directory.
            name = check_text("the name of a file", file.name)
            path = Path(directory, f"{number}{extension(Path(name)) or ''}")
            path.write_bytes(check_text(f"the file {name}", file.content).encode())
            named.append(InputFile(path, name))
        try:
            paths = [file.path for file in named]
            reader = DocumentReader(paths, tokenizer=lm.tokenizer, answered_chats="last")
            reader.files = named
            found = list(islice(reader, MOST_TEXTS + 1))
        except InputError as error:
            words = str(error)
            for file in named:
                words = words.replace(str(file.path), file.name)
            raise InputError(words.replace(directory, "their folder")) from error
    fewer = "Give fewer, or use `prismlm audit`, which has no such limit."
    if len(found) > MOST_TEXTS:
        raise InputError(f"more than {MOST_TEXTS:,} texts. {fewer}")
    characters = sum(len(one.text) for one in found)
    if characters > most:
        raise InputError(
            f"the texts have {characters:,} characters: the explorer reads {most:,} at once. "
            f"{fewer}"
        )
    return found, dict(reader.left_out)


def _read(
    lm: PrismLM,
    job: Job,
    audit: Audit,
    documents: list[Document],
    left_out: dict[str, int],
    tell: Tell,
) -> None:
    """Tell how many predictions there are, how many are done, each row, and the summary."""
    predictions = sum(max(0, len(document_ids(lm, one)) - 1) for one in documents)
    tell("start", {"id": job.id, "texts": len(documents), "predictions": predictions})
    done = 0

    def on_pass(count: int) -> bool:
        nonlocal done
        done += count
        tell("progress", {"predictions": done})
        return not job.stop.is_set()

    for row in audit.read(documents, on_pass):
        job.rows.append(row)
        # Of what it leans on, the page lists the most.
        leading = {name: row[name][:1] for name in ("by_source", "documents")}
        tell("row", rounded(row | leading))
    if audit.texts:
        job.summary = audit.to_dict() | {"left_out": left_out}
    end: dict[str, Any] = {"id": job.id, "stopped": audit.texts < len(documents)}
    tell("done", end | {"summary": audit_data(job.summary) if job.summary else None})


def _report(job: Job, kind: str) -> bytes:
    """Return a file as `prismlm audit` writes it."""
    if kind == "html":
        return audit_page(job.summary).encode()
    assert job.audit is not None
    with TemporaryDirectory() as directory:
        path = Path(directory) / f"audit.{kind}"
        with audit_files([path], [], job.audit.identity) as (add, _):
            for row in job.rows:
                add(row)
        return path.read_bytes()
