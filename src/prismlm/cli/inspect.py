"""prismlm inspect: how far a lens converged; what prototypes, channels and heads hold."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.errors import InputError
from prismlm.outputs import write_text
from prismlm.probes.results import Row, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prismlm.explain.attention_maps import AttentionMap
    from prismlm.probes.channels.report import ChannelReport

# Limits of the printed output; JSON has everything.
MAX_CONTEXTS = 5
MAX_CHANNELS, MAX_TOKENS, MAX_TEXT_LAYERS = 8, 3, 4
CARD = ("category", "role", "tags", "description", "usage", "positions", "score", "nearest_cosine")
ANSWERS = ".themes.answers.jsonl"

Tokens = Annotated[int, option("N", "Tokens to read; 0 for all.", min=0)]
Length = Annotated[int | None, option("T", "Window length in tokens (default: as trained).")]
SORT_HELP = "text: number of nearest positions; score: of the name."
SortBy = Annotated[Literal["text", "usage", "score", "name", "id"], option(None, SORT_HELP)]
UNITS_HELP = "Prototypes of a lens, channels of mixers, or attention heads."
Units = Annotated[Literal["prototypes", "channels", "heads"], option(None, UNITS_HELP)]
FILES_HELP = f"Texts in place of a corpus: {opt.TEXT_KINDS}."
# Figures of an index whose names say too little to readers.
INDEX_WORDS = {
    "share_read": "windows read, share",
    "kept": "contexts stored per prototype",
    "filled": "in use, with all their contexts",
    "converged_at": "converged at, share",
    "enough": "enough text",
}
CHECKS_HELP = "ablation, attention, hedging, mistakes or probe (default: all)."
PASSES_HELP = "Passes for the codes (default: as trained); 0: token by token."
LENGTH_HELP = "Tokens per text (default: a row, or 256)."

app = opt.group_with_default(
    "index", "Measure what a lens holds: `prismlm inspect MODEL`; or what channels and heads do."
)


def _settings(model: Path, **others: Any) -> dict[str, Any]:
    """Return what every report takes."""
    return {"name": model.resolve().name, "progress": output.progress(), **others}


def _layers(layer: int | None) -> tuple[int, ...] | None:
    return None if layer is None else (layer,)


@app.command()
def attention(
    model: opt.Model,
    text: Annotated[str | None, argument("TEXT", "Of at least two tokens.")] = None,
    layer: opt.Layer = None,
    head: Annotated[int | None, option("H", "Only this head of a layer, or of --group.")] = None,
    group: Annotated[str | None, option("GROUP", "Only signal or only noise heads.")] = None,
    out: Annotated[Path | None, option("FILE", "Write a PNG; needs the extra plot.")] = None,
    overwrite: opt.Overwrite = False,
    roles: Annotated[bool, flag("--roles", "Find heads for subjects, objects, verbs.")] = False,
    cases: Annotated[Path | None, option("FILE", "Sentences for --roles, as JSON lines.")] = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Show what attention heads look at along a text, or which of them look for a role.

    Heads may be those of signal/noise attention or of any Hugging Face decoder.
    """
    opt.check_one_of("either a text or --roles", text, roles)
    if roles:
        opt.check_unused("a picture shows one text, and --roles has many", out=out)
    else:
        opt.check_unused("a file of sentences is for --roles", cases=cases)
    opt.check_output_files(model, cases, overwrite=overwrite, png=out)
    if out is not None:
        opt.require_packages("matplotlib")
    from prismlm.explain.attention_maps import heads_of, read_maps
    from prismlm.models.checkpoint import read_checkpoint

    decoder, tokenizer = read_checkpoint(model)
    heads = heads_of(decoder, layer=layer, head=head, group=group)
    if text is None:
        from prismlm.probes.heads.roles import (
            best_heads,
            load_role_cases,
            random_model,
            search_roles,
        )

        marked = load_role_cases(cases)
        how: dict[str, Any] = {"heads": heads, "seed": seed, "progress": output.progress()}
        found = search_roles(decoder, tokenizer, marked, **how)
        control = search_roles(random_model(decoder, seed), tokenizer, marked, **how)["roles"]
        value, best = found.to_dict() | {"untrained": control}, best_heads(found)
        value["cases"] = cases and str(cases)
        table = replace(best, facts=best.facts | {"with_random_weights": control})
    else:
        maps = read_maps(decoder, tokenizer, text, heads)
        if out is not None:
            from prismlm.pages.plots import save_maps

            output.write(out, partial(save_maps, maps))
        value, table = _map_figures(text, maps)
    output.show({"model": str(model)} | value, as_json, table)


def _map_figures(text: str, maps: Iterable[AttentionMap]) -> tuple[Row, Table]:
    figures: list[Row] = []
    rows: list[Row] = []
    column = "strongest on others: from → to"
    for heads_map in maps:
        links, on_itself = heads_map.strongest(), heads_map.on_itself()
        strongest = [link._asdict() for link in links]
        figures.append(heads_map.to_dict() | {"on_itself": on_itself, "strongest": strongest})
        names = list(map(output.token_text, heads_map.tokens))
        shown = (f"{names[x.source]} → {names[x.target]} {x.weight:.2f}" for x in links)
        rows.append({"head": heads_map.head.title, "itself": on_itself, column: "   ".join(shown)})
    table = Table(text, {"head": "", "itself": ".2f", column: ""}, tuple(rows))
    return {"text": text, "maps": figures}, table


@app.command()
def prototypes(
    model: opt.Model,
    prototype: Annotated[int | None, argument("ID", "Show this prototype in full.")] = None,
    search: Annotated[str, option("WORDS", "Search names, tokens and contexts.", "--search")] = "",
    category: Annotated[str | None, option("NAME", "Only those of this category.")] = None,
    sort: SortBy = "text",
    limit: Annotated[int, option("N", "Prototypes listed.", min=1)] = 20,
    everything: Annotated[bool, flag("--all", "Also list those with few positions.")] = False,
    lens_name: opt.Lens = None,
    as_json: opt.Json = False,
) -> None:
    """List the prototypes of a lens, or show one in full: name, tokens, where it fires."""
    if prototype is not None:
        opt.check_unused("one prototype is shown", search=search or None, category=category)
    from prismlm.interventions.values import Group, members_of
    from prismlm.lens.labels.catalogue import Catalogue
    from prismlm.lens.lens import MIN_PLACES

    _, lens = opt.open_with_lens(model, lens_name)
    catalogue = Catalogue(lens)
    if prototype is not None:
        card = catalogue.card(prototype)
        tokens = "  ".join(f"{token!s} {value:+.2f}" for token, value in card["tokens"])
        facts = {name: card[name] for name in CARD if card[name]}
        title = output.heading("\nRaised tokens, the most distinctive first, with their logits")
        parts = (output.heading(f"#{card['id']} {card['name']}"), facts, title, f"  {tokens}")
        fires = contexts_of(card["contexts"][:MAX_CONTEXTS])
        return output.show(card, as_json, *parts, output.heading("\nWhere it fires"), fires)
    if category is not None:
        members_of(Group(0.0, category), lens.num_prototypes, lens)
    matches = catalogue.of_category(catalogue.search(search, sort, everything=True), category or "")
    listed = matches if everything else matches[lens.listed[matches]]
    rows = [catalogue.row(number) for number in listed[:limit].tolist()]
    table = output.table("", "id name category positions:, usage:.2% score:.0%", rows)
    more, hidden = len(listed) - len(rows), len(matches) - len(listed)
    unlisted = f"{hidden:,} with fewer than {MIN_PLACES} places are not listed: --all"
    counts = {f"… {more:,} more: --limit N": more, unlisted: hidden}
    notes = [output.dim(note) for note, count in counts.items() if count]
    output.show({"total": len(listed), "items": rows}, as_json, table, *notes)


def contexts_of(contexts: list[Row]) -> Iterator[Any]:
    """Yield the lines of rows of a lens's index: their text, document, source and licence."""
    from prismlm.cli.trace import passage_lines
    from prismlm.lens.lens import Around

    for context in contexts:
        texts = (context[name] or "" for name in ("before", "token", "after"))
        yield from passage_lines(Around(*texts))
        origin = (context["doc_id"], context["source"], context["license"])
        yield output.dim("         " + " · ".join(filter(None, origin)))


@app.command()
def channels(
    model: opt.Model,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    max_tokens: Tokens = 100_000,
    layer: opt.Layer = None,
    text: Annotated[str | None, option("TEXT", "Show what this text writes and reads.")] = None,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Show what the channels of prototype mixers carry: figures, half-lives, tokens, sequences.

    For LLaMA's layers the figures are those of the norms of value heads.
    """
    opt.check_output_files(model, corpus, overwrite=overwrite, html=html)
    from prismlm.corpus.windows import Sequences
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.probes.channels import channel_report
    from prismlm.probes.texts import open_corpus

    decoder, tokenizer = read_checkpoint(model)
    sequences = None
    if corpus is not None or text is None:
        sequences = Sequences(open_corpus(model, corpus), split, max_tokens=max_tokens or None)
    how = _settings(model, text=text, layers=_layers(layer))
    report = channel_report(decoder, tokenizer, sequences, **how)
    if html is not None:
        from prismlm.pages.channels import channel_page

        page = channel_page(report, decoder, sequences.corpus if sequences else None)
        output.write(html, partial(write_text, text=page))
    value = report.to_dict()
    output.show(value, as_json, _channel_parts(report, value, layer))


def _channel_parts(report: ChannelReport, value: Row, layer: int | None) -> Iterator[Any]:
    yield output.heading(f"{report.model}\n")
    if report.of == "heads":
        yield "No prototype mixers, so no channels: these are the norms of value heads.\n"
    if part := report.corpus:
        tokens = output.format_count(part["positions"])
        yield output.dim(f"{tokens} tokens of {part['name']}, {part['split']}\n")
        yield from report.tables
    rows = [
        channel | {"layer": figures["layer"], "writes_most": "  ".join(tokens)}
        for figures in value["layers"]
        for channel in (figures["channels"] or ())[: MAX_CHANNELS if layer is None else None]
        for tokens in [[output.token_text(t["text"]) for t in channel["tokens"][:MAX_TOKENS]]]
    ]
    if rows:
        title = "Channels" + f": {MAX_CHANNELS} of each layer, all with --layer" * (layer is None)
        columns = "layer channel half_life:.2f repetition:.2f writes_most"
        yield output.table(title, columns, rows)
    if report.text is not None:
        curves = report.text.curves[-MAX_TEXT_LAYERS:]
        rows = [{"token": output.token_text(token)} for token in report.text.text.tokens]
        for of_layer in curves:
            for verb, gate in (("writes", of_layer.write), ("reads", of_layer.read)):
                for row, number in zip(rows, gate.argmax(-1).tolist(), strict=True):
                    row[f"layer_{of_layer.layer}_{verb}"] = f"#{number}"
        title = "The text: the channel each token writes and reads most"
        yield output.table(title, " ".join(rows[0]), rows)


@app.command()
def interventions(
    models: opt.Models,
    cases: Annotated[str, option("NAME|FILE", "Such as covid or women; or a file.")],
    channel: Annotated[list[str] | None, option("L:K", "Channel K of layer L; repeatable.")] = None,
    find: Annotated[bool, flag("--find", "Find the channel that writes at the targets.")] = False,
    corpus: Annotated[Path | None, option("DIR", "The corpus that --find reads.")] = None,
    max_tokens: Tokens = 500_000,
    controls: Annotated[int, option("N", "Random control channels per channel.")] = 5,
    minimum: Annotated[float, option("P", "Leave out cases whose target is less probable.")] = 0.01,
    first_token: Annotated[bool, flag("--first-token", "Use a target's first token.")] = False,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Intervene on a channel; show changed word probabilities, with random channels as controls."""
    named = [re.fullmatch(r"(\d{1,9}):(\d{1,9})", text) for text in channel or []]
    if None in named:
        wrong = (channel or [])[named.index(None)]
        raise InputError(f"--channel is {wrong!r}: expected LAYER:CHANNEL, such as 1:14.")
    opt.check_one_of("either channels (--channel L:K) or --find", named, find)
    if find != (corpus is not None):
        raise InputError("--find and --corpus DIR, the text to find channels in, go together.")
    from prismlm.corpus import Corpus
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.probes.channels.effects import concept_in_model, load_cases

    settings: dict[str, Any] = {
        "channels": [(int(match[1]), int(match[2])) for match in named if match],
        "corpus": Corpus.open(corpus) if corpus else None,
        "max_tokens": max_tokens or None,
        "first_token": first_token,
        "controls": controls,
        "minimum_probability": minimum,
        "seed": seed,
        "progress": output.progress(),
    }
    rows = load_cases(cases)
    reports = [
        concept_in_model(*read_checkpoint(path), rows, name=str(path), **settings)
        for path in models
    ]
    emerges = [report.facts["emerges"] for report in reports if "emerges" in report.facts]
    parts: list[Any] = [*reports]
    if len(emerges) > 1:
        parts.append(f"p below 0.05 in {sum(emerges)} of {len(emerges)} models")
    value = {"cases": cases, "models": [report.to_dict() for report in reports]}
    output.show(value, as_json, *parts)


@app.command()
def heads(
    models: opt.Models,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 20_000,
    length: Length = None,
    layer: opt.Layer = None,
    as_json: opt.Json = False,
) -> None:
    """Show where each head looks, and how far; compare signal heads with noise heads.

    For several models, such as seeds, show each comparison.
    """
    from prismlm.probes.heads import head_report
    from prismlm.probes.texts import open_text

    read = (split, tokens or None, length)
    reports = [
        head_report(*open_text(path, corpus, *read), **_settings(path, layers=_layers(layer)))
        for path in models
    ]
    output.show({"models": [report.to_dict() for report in reports]}, as_json, *reports)


@app.command()
def spectra(
    model: opt.Model,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 50_000,
    length: Length = None,
    context: Annotated[
        int | None, option("T", "Window of the loss (default: two rows).", min=2)
    ] = None,
    seed: opt.Seed = 0,
    loss_only: Annotated[bool, flag("--loss-only", "Only the loss by length.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
    from prismlm.lens.options import trained_length
    from prismlm.probes.heads import spectra_report
    from prismlm.probes.texts import open_text

    inputs = open_text(model, corpus, split, tokens or None, length)
    settings = _settings(model, context=context, seed=seed, loss_only=loss_only)
    report = spectra_report(*inputs, trained_length=trained_length(model), **settings)
    output.show(report.to_dict(), as_json, report)


@app.command()
def themes(
    model: opt.Model,
    of: Units = "prototypes",
    lens_name: opt.Lens = None,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 100_000,
    layer: opt.Layer = None,
    units: Annotated[int, option("N", "Number of units, sampled by seed.", min=1)] = 100,
    seed: opt.Seed = 0,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    as_json: opt.Json = False,
) -> None:
    """Show the themes of a model's units, from the ten sequences that activate each most.

    They are judged by their words, or with --endpoint by a language model, and compared with ten
    random sequences.
    """
    if of == "prototypes":
        opt.check_unused(
            "prototypes are read from the text of their lens", corpus=corpus, layer=layer
        )
    else:
        opt.check_unused(f"{of} are read from --corpus", lens=lens_name)
    server = opt.open_endpoint(endpoint, endpoint_model)
    from prismlm.probes.texts import open_text
    from prismlm.probes.themes import EndpointJudge, layer_units, prototype_units, theme_report

    text: Any
    if of == "prototypes":
        lm, lens = opt.open_with_lens(model, lens_name)
        sample, left_out = prototype_units(lens, lm.head.prototypes, units, seed)
        text, split = lens.corpus, lens.meta.split  # pyright: ignore[reportAssignmentType]
    else:
        decoder, sequences = open_text(model, corpus, split, tokens or None)
        kind = "channel" if of == "channels" else "head"
        sample, left_out = layer_units(decoder, sequences, kind, layer, units, seed)
        text = sequences.corpus
    judge = None if server is None else EndpointJudge(server, model / ANSWERS)
    settings = _settings(model, split=split, of=of, judge=judge, seed=seed, left_out=left_out)
    report = theme_report(sample, text, **settings)
    usage = None if judge is None else judge.session.usage()
    asked = [] if usage is None else [output.facts_line(usage)]
    output.show({**report.to_dict(), "asked": usage}, as_json, report, *asked)


@app.command()
def uncertainty_feedback(
    model: opt.Model,
    files: Annotated[list[Path] | None, argument("FILE...", FILES_HELP)] = None,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    text_column: Annotated[str, option("NAME", "Column of the texts.")] = "text",
    check: Annotated[list[str] | None, option("CHECK", CHECKS_HELP)] = None,
    texts: Annotated[int, option("N", "Texts to read.", min=1)] = 64,
    tokens: Annotated[int | None, option("T", LENGTH_HELP, min=2)] = None,
    passes: Annotated[int | None, option("N", PASSES_HELP, min=0)] = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Show whether a model uses the uncertainty that is fed back to it.

    Each check has a control.
    """
    from prismlm.corpus.documents import Columns
    from prismlm.corpus.read import DocumentReader
    from prismlm.corpus.tokenizer import check_tokenizer_of
    from prismlm.lens.options import trained_length
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.models.device import learned_positions
    from prismlm.probes import uncertainty_feedback as probe
    from prismlm.probes.texts import DEFAULT_LENGTH, open_corpus

    if files:
        opt.check_unused("texts come from FILE...", corpus=corpus)
    decoder, tokenizer = read_checkpoint(model)
    # With one pass every position has the same code, which carries no information.
    default_passes = max(2, probe.feedback_of(decoder).passes)
    options = probe.InspectOptions(default_passes if passes is None else passes, seed=seed)
    row = trained_length(model) or DEFAULT_LENGTH
    length = tokens or min(row, learned_positions(decoder) or row)
    size, settings = {"texts": texts, "tokens": length, "seed": seed}, _settings(model)
    if files:
        title = files[0].name + " …" * (len(files) > 1)
        documents = DocumentReader(files, Columns(text=text_column))
        sample = probe.document_sample(documents, tokenizer, name=title, **size)
    else:
        training_text = open_corpus(model, corpus)
        check_tokenizer_of(training_text, tokenizer, settings["name"])
        sample = probe.corpus_sample(training_text, split, **size)
    inputs = (decoder, tokenizer, sample, check or [])
    report = probe.inspect_uncertainty_feedback(*inputs, options=options, **settings)
    output.show(report.to_dict(), as_json, report)


@app.command()
def index(
    model: opt.Model,
    lens_name: opt.Lens = None,
    verify: Annotated[bool, flag("--verify", "Compare the weights with their digests.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show whether an index read enough text, and how it converged.

    The files of the lens are compared with their digests.
    """
    from prismlm.lens.layout import trained_on_words
    from prismlm.lens.lens import inspect_lens
    from prismlm.models.sidecar import verify_weights

    _, lens = opt.open_with_lens(model, lens_name)
    verified = {"weights_verified": verify_weights(model)} if verify else {}
    value = {"model": str(model), "lens": lens.address, **verified, **inspect_lens(lens)}
    trained = trained_on_words(value["trained_on"], value["split"])
    shown = {INDEX_WORDS.get(name, name): x for name, x in value.items() if name != "trained_on"}
    shown = shown | {"model trained on them": trained}
    verdict = shown.pop("verdict")
    parts = [*output.tables(shown), verdict]
    if verify and not value["weights_verified"]:
        parts.append(
            "The weights cannot be verified: the model directory has no checksums of them."
        )
    output.show(value, as_json, *parts)
