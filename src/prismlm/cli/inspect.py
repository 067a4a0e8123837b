"""prismlm inspect: how far a lens converged; what prototypes, channels and heads hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import argument, flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError, suggest
from prismlm.outputs import output_file, write_text
from prismlm.probes.results import Report, Row, Table, markdown_of

if TYPE_CHECKING:
    from prismlm.corpus import Corpus
    from prismlm.corpus.windows import Sequences
    from prismlm.probes.channels.report import ChannelReport

# Tokens per window of a model without recorded training rows.
DEFAULT_LENGTH = 256
# Limits of the printed output; JSON has everything.
MAX_CURVE_POINTS, MAX_CONTEXTS, MAX_UNITS = 12, 5, 40
MAX_CHANNELS, MAX_TOKENS, MAX_TEXT_LAYERS = 8, 3, 4
CARD = ("category", "role", "tags", "description", "usage", "positions", "score", "nearest_cosine")
ANSWERS = ".themes.answers.jsonl"

Tokens = Annotated[int, option("N", "Tokens to read; 0 for all.", min=0)]
Length = Annotated[int | None, option("T", "Tokens of a window (default: as trained).")]
SORT_HELP = "text: positions that it is the nearest to; score: of the name."
SortBy = Annotated[Literal["text", "usage", "score", "name", "id"], option(None, SORT_HELP)]
Unit = Annotated[Literal["relative", "points"], option(None, "Changes: in %, or in points.")]
LeastVisible = Annotated[int, option("N", "Only queries with so many tokens of context.")]
UNITS_HELP = "Prototypes of a lens, channels of mixers, or attention heads."
Units = Annotated[Literal["prototypes", "channels", "heads"], option(None, UNITS_HELP)]
FILES_HELP = f"Texts in place of a corpus: {opt.TEXT_KINDS}."
CHECKS_HELP = (
    "ablation, prefill, attention, hedging, mistakes or probe; may be repeated (default: all)."
)
SIGNAL_HELP = "The model's own codes: by passes, or by recursion, the true ones."
Signal = Annotated[Literal["passes", "recursion"], option(None, SIGNAL_HELP)]
FirstToken = Annotated[bool, flag("--first-token", "Use the first token of a longer target.")]
FindTokens = Annotated[int, option("N", "Tokens that --find reads; 0: all.", min=0)]

app = opt.group_with_default(
    "index", "Measure what a lens holds: `prismlm inspect MODEL`; or what channels and heads do."
)


def _open_corpus(model: Path, corpus: Path | None) -> Corpus:
    """Open a corpus; by default the training corpus of a model."""
    from prismlm.corpus import Corpus
    from prismlm.lens.options import training_corpus

    return training_corpus(model) if corpus is None else Corpus.open(corpus)


def _open(
    path: Path, corpus: Path | None, split: Any, tokens: int, length: int | None
) -> tuple[Any, Sequences]:
    """Open a model, and the windows of a corpus to read with it."""
    from prismlm.corpus.tokenizer import check_tokenizer_of
    from prismlm.corpus.windows import Sequences
    from prismlm.lens.options import trained_length
    from prismlm.models.checkpoint import read_checkpoint

    model, tokenizer = read_checkpoint(path)
    opened = _open_corpus(path, corpus)
    check_tokenizer_of(opened, tokenizer, path.resolve().name)
    row = trained_length(path) or DEFAULT_LENGTH if length is None else length
    return model, Sequences(opened, split, row, tokens or None)


def _print_report(report: Report, as_json: bool) -> None:
    output.print_json(report.to_dict()) if as_json else output.print_report(report)


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
    draws: Annotated[int | None, option("N", "Draws of random words, for --roles.", min=1)] = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Show what attention heads look at along a text, or which of them look for a role.

    Heads may be those of signal/noise attention or of any Hugging Face decoder.
    """
    opt.check_one_of("either a text or --roles", text, roles)
    if roles and out is not None:
        raise InputError("--out is a picture of one text: give a text in place of --roles.")
    if not roles and (cases is not None or draws is not None):
        raise InputError("--cases and --draws are for --roles: add it, in place of a text.")
    opt.check_output_files(model, cases, overwrite=overwrite, png=out)
    if out is not None:
        opt.require_packages("matplotlib")
    from prismlm.explain.attention_maps import heads_of, read_maps
    from prismlm.models.checkpoint import read_checkpoint

    opened, tokenizer = read_checkpoint(model)
    heads = heads_of(opened, layer=layer, head=head, group=group)
    if text is None:
        value, table = _search_roles(opened, tokenizer, cases, heads=heads, draws=draws, seed=seed)
    else:
        maps = read_maps(opened, tokenizer, text, heads)
        if out is not None:
            from prismlm.pages.plots import save_maps

            save_maps(maps, out)
            output.report_written(out)
        value, table = _map_figures(text, maps)
    output.print_json({"model": str(model)} | value) if as_json else output.print_table(table)


def _map_figures(text: str, maps: Iterable[Any]) -> tuple[Row, Table]:
    figures: list[Row] = []
    rows: list[Row] = []
    for attention_map in maps:
        links, on_itself = attention_map.strongest(), attention_map.on_itself()
        extra = {"on_itself": on_itself, "strongest": [link._asdict() for link in links]}
        figures.append(attention_map.to_dict() | extra)
        names = [output.token_text(token) for token in attention_map.tokens]
        shown = (f"{names[x.source]} → {names[x.target]} {x.weight:.2f}" for x in links)
        strongest = {"strongest on others: from → to": "   ".join(shown)}
        rows.append({"head": attention_map.head.title, "itself": on_itself} | strongest)
    columns = {"head": "", "itself": ".2f", "strongest on others: from → to": ""}
    return {"text": text, "maps": figures}, Table(text, columns, tuple(rows))


def _search_roles(
    model: Any, tokenizer: Any, path: Path | None, **search: Any
) -> tuple[Row, Table]:
    """Search heads for roles; the control is the same search with random weights."""
    from prismlm.probes.heads import roles

    search["progress"] = ConsoleReporter()
    cases = roles.load_role_cases(path)
    result = roles.search_roles(model, tokenizer, cases, **search)
    untrained = roles.random_model(model, search["seed"])
    control = roles.search_roles(untrained, tokenizer, cases, **search)["roles"]
    source = None if path is None else str(path)
    value = {"cases": source, **result.to_dict(), "untrained": control}
    table = roles.best_heads(result)
    return value, replace(table, facts=table.facts | {"with_random_weights": control})


@app.command()
def prototypes(
    model: opt.Model,
    prototype: Annotated[int | None, argument("ID", "Show this prototype in full.")] = None,
    search: Annotated[str, option("WORDS", "In names, tokens and contexts.", "--search")] = "",
    category: Annotated[str | None, option("NAME", "Only those of a category.")] = None,
    sort: SortBy = "text",
    limit: Annotated[int, option("N", "Prototypes listed.", min=1)] = 20,
    everything: Annotated[bool, flag("--all", "Also those nearest at few positions.")] = False,
    lens: opt.Lens = None,
    as_json: opt.Json = False,
) -> None:
    """List the prototypes of a lens, or show all of one: name, tokens, where it fires."""
    from prismlm.lens.labels.catalogue import Catalogue
    from prismlm.lens.lens import MIN_PLACES

    _, opened = opt.load_with_lens(model, lens)
    catalogue = Catalogue(opened)
    if prototype is not None:
        card = catalogue.card(prototype)
        output.print_json(card) if as_json else _print_card(card)
        return
    if category is not None and category not in opened.categories:
        known = sorted(set(filter(None, opened.categories)))
        raise InputError(
            f"no prototype of {opened.path} has the category {category!r}: expected "
            f"{', '.join(known) or 'none, since `prismlm label` has not named them'}."
            f"{suggest(category, known)}"
        )
    matches = catalogue.of_category(catalogue.search(search, sort, everything=True), category or "")
    listed = matches if everything else matches[opened.listed[matches]]
    rows = [catalogue.row(number) for number in listed[:limit].tolist()]
    if as_json:
        output.print_json({"total": len(listed), "items": rows})
        return
    columns = {"id": "", "name": "", "category": "", "positions": ",", "usage": ".2%"}
    output.print_rows("", columns | {"score": ".0%"}, rows)
    if len(listed) > len(rows):
        output.say(f"… {len(listed) - len(rows):,} more: --limit N", style="dim")
    if hidden := len(matches) - len(listed):
        note = f"{hidden:,} with fewer than {MIN_PLACES} places are not listed: --all"
        output.say(note, style="dim")


def _print_card(card: Row) -> None:
    from prismlm.cli.trace import print_passage
    from prismlm.lens.text import Around

    output.say(f"#{card['id']} {card['name']}", style="bold")
    output.print_facts({name: card[name] for name in CARD if card[name]})
    output.say("\nRaised tokens, the most distinctive first, with their logits", style="bold")
    output.say("  " + "  ".join(f"{token!s} {value:+.2f}" for token, value in card["tokens"]))
    output.say("\nWhere it fires", style="bold")
    for context in card["contexts"][:MAX_CONTEXTS]:
        texts = (context[name] or "" for name in ("before", "token", "after"))
        print_passage(output.stdout_console(), Around(*texts))
        origin = (context["doc_id"], context["source"], context["license"])
        output.say("         " + " · ".join(filter(None, origin)), style="dim")


@app.command()
def channels(
    model: opt.Model,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    max_tokens: Tokens = 100_000,
    layer: opt.Layer = None,
    channel: Annotated[int | None, option("K", "Only this channel of --layer, in full.")] = None,
    text: Annotated[str | None, option("TEXT", "Show what this text writes and reads.")] = None,
    beside: Annotated[
        Path | None, option("MODEL", "A second model to compare metrics with.")
    ] = None,
    out: Annotated[Path | None, option("DIR", "Write plots; needs the extra plot.")] = None,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Show what the channels of prototype mixers carry: figures, half-lives, tokens, sequences.

    Of a model whose layers are built as LLaMA's it shows the same figures of the norms of its
    value heads; it has no channels.
    """
    if channel is not None and layer is None:
        raise InputError("--channel needs the --layer that it is in.")
    opt.check_output_files(model, corpus, beside, overwrite=overwrite, directory=out, html=html)
    if out is not None:
        opt.require_packages("matplotlib")
    from prismlm.corpus.windows import Sequences
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.models.decoders.protot import check_channel, check_layer, mixers_of
    from prismlm.probes.channels import channel_report

    opened, tokenizer = read_checkpoint(model)
    if html is not None or channel is not None:
        mixers = mixers_of(opened)
        if layer is not None and channel is not None:
            check_layer(len(mixers), layer)
            check_channel(mixers[layer].channels, layer, channel)
    sequences = None
    if corpus is not None or text is None or beside is not None:
        sequences = Sequences(_open_corpus(model, corpus), split, max_tokens=max_tokens or None)
    shared: dict[str, Any] = {"sequences": sequences, "progress": ConsoleReporter()}
    layers = None if layer is None else (layer,)
    name = model.resolve().name
    report = channel_report(opened, tokenizer, text=text, name=name, layers=layers, **shared)
    other = None
    if beside is not None:
        # All its layers: it may have another depth.
        other = channel_report(*read_checkpoint(beside), name=beside.resolve().name, **shared)
    if html is not None:
        from prismlm.pages.channels import channel_page

        read = sequences.corpus if sequences else None
        write_text(html, channel_page(report, opened, read))
        output.report_written(html)
    if out is not None:
        _draw_channels(report, other, (layer, channel), out)
    if as_json:
        output.print_json(_channel_figures(report, other, channel))
    else:
        _print_channels(report, other, layer, channel)


def _draw_channels(
    report: ChannelReport, other: ChannelReport | None, selection: tuple[Any, Any], out: Path
) -> None:
    from prismlm.pages.plots import channel_figures

    selected = None if None in selection else selection
    for name, figure in channel_figures(report, other, selected).items():
        with output_file(out / f"{name}.svg") as temporary:
            # Without a date, so that the same report gives the same file.
            figure.savefig(temporary, format="svg", metadata={"Date": None})
        output.report_written(out / f"{name}.svg")


def _channel_figures(
    report: ChannelReport, other: ChannelReport | None, channel: int | None
) -> Row:
    value: Row = {**report.to_dict(), "beside": None}
    if channel is not None:
        for layer in value["layers"]:
            layer["channels"] = [c for c in layer["channels"] if c["channel"] == channel]
    if other is not None:
        figures, keys = other.to_dict(), ("layer", "shared_gates", "metrics")
        layers = [{key: layer[key] for key in keys} for layer in figures["layers"]]
        value["beside"] = {"model": figures["model"], "of": figures["of"], "layers": layers}
    return value


def _print_channels(
    report: ChannelReport, other: ChannelReport | None, layer: int | None, channel: int | None
) -> None:
    """Print a report: some channels of every layer, all of one layer, or one channel in full."""
    output.say(report.model + "\n", style="bold")
    if report.of == "heads":
        output.say("No prototype mixers, so no channels: these are the norms of value heads.\n")
    if part := report.corpus:
        tokens = f"{output.format_count(part.positions)} tokens of {part.name}, {part.split}\n"
        output.say(tokens, style="dim")
        tables = () if channel is not None else report.tables[1:]
        for table in (report.metrics, *([other.metrics] if other else []), *tables):
            output.print_table(table)
    for figures in report.to_dict()["layers"]:
        if channel is not None:
            output.say(f"Layer {figures['layer']}", style="bold")
            output.print_value(figures["channels"][channel])
        elif figures["channels"]:
            _print_layer(figures, all_channels=layer is not None)
    if report.text is not None:
        _print_text(report.text, channel)


def _print_layer(layer: Row, *, all_channels: bool) -> None:
    """Print all channels of a layer, or some, evenly spaced by half-life."""
    chosen = sorted(layer["channels"], key=lambda channel: channel["half_life"] or 0.0)
    if not all_channels:
        step = max(1.0, (len(chosen) - 1) / (MAX_CHANNELS - 1))
        chosen = [chosen[round(step * i)] for i in range(min(MAX_CHANNELS, len(chosen)))]

    def join(tokens: list[Row]) -> str | None:
        return "  ".join(output.token_text(token["text"]) for token in tokens) or None

    rows = [
        channel
        | {
            "writes_most": join(channel["tokens"][:MAX_TOKENS]),
            "in first sequence": join((channel["sequences"] or [{"tokens": []}])[0]["tokens"]),
        }
        for channel in chosen
    ]
    columns = {"channel": "", "half_life": ".2f", "repetition": ".2f"}
    columns |= {"writes_most": "", "in first sequence": ""}
    title = f"Layer {layer['layer']}: {len(chosen)} of {len(layer['channels'])}; all with --layer"
    output.print_rows(title, columns, rows)


def _print_text(text: Any, channel: int | None) -> None:
    """Print what each token writes and reads: the largest gates, or those of a channel."""
    tokens = [output.token_text(token) for token in text.text.tokens]
    rows: list[Row] = [{"token": token} for token in tokens]
    if channel is None:
        for curves in text.curves[-MAX_TEXT_LAYERS:]:
            for verb, gate in (("writes", curves.write), ("reads", curves.read)):
                largest = (x.tolist() for x in gate.max(-1))
                for row, value, number in zip(rows, *largest, strict=True):
                    row[f"layer {curves.layer} {verb}"] = f"#{number:<3} {value:.2f}"
        title = "The text: the channel each token writes and reads most"
        output.print_rows(title, dict.fromkeys(rows[0], ""), rows)
        return
    curves = text.curves[0]
    memory = curves.memory(channel)
    for i, row in enumerate(rows):
        share, strongest = (x.item() for x in memory[i].max(-1))
        row |= {"write": curves.write[i, channel].item(), "read": curves.read[i, channel].item()}
        row |= {"still_held": curves.mass[i, channel].item()}
        row |= {"holds_most_of": f"{tokens[strongest]} {share:.0%}" if share > 0 else None}
    columns = {"token": "", "write": ".3f", "read": ".3f", "still_held": ".2f"}
    output.print_rows("The text", columns | {"holds_most_of": ""}, rows)


@app.command()
def interventions(
    models: opt.Models,
    cases: Annotated[str, option("NAME|FILE", "Such as covid or women; or JSON lines.")],
    channel: Annotated[list[str] | None, option("L:K", "Channel K of layer L; repeatable.")] = None,
    find: Annotated[bool, flag("--find", "Find the channel that writes at the targets.")] = False,
    corpus: Annotated[Path | None, option("DIR", "The corpus that --find reads.")] = None,
    max_tokens: FindTokens = 500_000,
    controls: Annotated[int, option("N", "Random control channels per channel.")] = 5,
    by: Unit = "relative",
    minimum: Annotated[float, option("P", "Leave out cases whose target is less probable.")] = 0.01,
    first_token: FirstToken = False,
    seed: opt.Seed = 0,
    out: Annotated[Path | None, option("DIR", "Write JSON, Markdown and Parquet.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Intervene on a channel; show changed word probabilities, with random channels as controls."""
    pairs = opt.parse_layer_pairs("--channel", "CHANNEL", channel)
    opt.check_one_of("either channels (--channel L:K) or --find", pairs, find)
    if find and corpus is None:
        raise InputError("--find needs the text to find channels in: --corpus DIR.")
    opt.check_output_files(*models, corpus, cases, overwrite=overwrite, directory=out)
    from prismlm.corpus import Corpus
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.probes.channels.concepts import concept_in_model
    from prismlm.probes.channels.effects import TableOptions, load_cases

    settings: dict[str, Any] = {
        "channels": pairs,
        "corpus": Corpus.open(corpus) if corpus else None,
        "max_tokens": max_tokens or None,
        "options": TableOptions(
            controls=controls, minimum_probability=minimum, first_token=first_token, seed=seed
        ),
        "progress": ConsoleReporter(),
    }
    loaded = load_cases(cases)
    results = [
        concept_in_model(*read_checkpoint(path), loaded, name=str(path), **settings)
        for path in models
    ]
    value = {"cases": cases, "models": [result.to_dict() for result in results]}
    if out is not None:
        _write_interventions(out, results, value, by)
    output.print_json(value) if as_json else _print_interventions(results, by)


def _write_interventions(out: Path, results: list[Any], value: Row, by: Any) -> None:
    output.write_json(out / "interventions.json", value)
    for number, result in enumerate(results):
        stem, table = f"{number}-{Path(result.name).resolve().name}", result.table
        table.to_parquet(out / f"{stem}.parquet")
        tables = [table.summary(), *(table.cases(channel, by) for channel in table.controls)]
        write_text(out / f"{stem}.md", "\n".join(map(markdown_of, tables)))
        output.report_written(out / f"{stem}.md")


def _print_interventions(results: list[Any], by: Any) -> None:
    """Print every model's channel and tables, and how many models have such a channel."""
    for result in results:
        output.say(result.name, style="bold")
        if result.ranking is not None:
            output.print_table(result.ranking)
        if result.heldout_difference is not None:
            output.say(
                f"the same channel on held-out text: {result.heldout_difference:+.2f}, "
                f"{result.heldout_count:,} occurrences\n"
            )
        for channel in result.table.controls:
            output.print_table(result.table.cases(channel, by))
        output.print_table(result.table.summary())
    emerges = [result.emerges for result in results if result.emerges is not None]
    if len(emerges) > 1:
        output.say(f"p below 0.05 in {sum(emerges)} of {len(emerges)} models")


@app.command()
def heads(
    models: opt.Models,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 20_000,
    length: Length = None,
    layer: opt.Layer = None,
    least_visible: LeastVisible = 16,
    out: Annotated[Path | None, option("FILE.csv", "Write one row per head.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Show how far each head looks and what at; signal heads beside noise heads.

    Of several models, such as seeds, it shows each one's comparison and whether they agree.
    """
    opt.check_output_files(*models, corpus, overwrite=overwrite, csv=out)
    from prismlm.probes.heads import across_models, head_report, write_heads

    settings: dict[str, Any] = {"layers": None if layer is None else (layer,)}
    settings |= {"least_visible": least_visible, "progress": ConsoleReporter()}
    reports: list[Report] = []
    for path in models:
        opened = _open(path, corpus, split, tokens, length)
        reports.append(head_report(*opened, name=path.resolve().name, **settings))
    comparisons = [report["comparison"] for report in reports if "comparison" in report.tables]
    across = across_models(comparisons) if len(comparisons) > 1 else None
    if out is not None:
        write_heads(reports, out)
        output.report_written(out)
    if as_json:
        values = [report.to_dict() for report in reports]
        output.print_json({"models": values, "across": across and across.to_dict()})
        return
    for report in reports:
        tables = dict(report.tables)
        if len(reports) > 1:
            tables.pop("heads", None)
        output.print_report(replace(report, tables=tables))
    if across is not None:
        output.print_table(across)


@app.command()
def spectra(
    model: opt.Model,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 50_000,
    length: Length = None,
    positions: Annotated[int, option("N", "Positions for coding rates and content.")] = 2048,
    distortion: Annotated[float, option("EPSILON", "ε of the coding rates.")] = 0.5,
    order: Annotated[int, option("N", "Of small denominators: n and m from 1 to this.")] = 22,
    context: Annotated[int | None, option("T", "Tokens of the loss (default: two rows).")] = None,
    documents: Annotated[int, option("N", "Documents for the loss.")] = 32,
    seed: opt.Seed = 0,
    loss_only: Annotated[bool, flag("--loss-only", "Only the loss by length.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
    from prismlm.lens.options import trained_length
    from prismlm.probes.heads import SpectraOptions, spectra_report

    opened = _open(model, corpus, split, tokens, length)
    trained = trained_length(model)
    options = SpectraOptions(positions, distortion, order, context, trained, documents, seed)
    settings: dict[str, Any] = {"loss_only": loss_only, "progress": ConsoleReporter()}
    report = spectra_report(*opened, name=model.resolve().name, options=options, **settings)
    _print_report(report, as_json)


@app.command()
def themes(
    model: opt.Model,
    of: Units = "prototypes",
    lens: opt.Lens = None,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 100_000,
    layer: Annotated[int | None, option("N", "Only this layer's units.", min=0)] = None,
    units: Annotated[int, option("N", "Units, drawn by seed.", min=1)] = 100,
    seed: opt.Seed = 0,
    endpoint: opt.Endpoint = None,
    endpoint_model: opt.EndpointModel = None,
    as_json: opt.Json = False,
) -> None:
    """Show the themes of a model's units, from the ten sequences that activate each most.

    For each unit: its main theme, how well that is disentangled from others, how many of the ten
    sequences hold it, and how many themes there are; beside ten random sequences. Words alone say
    so, or with --endpoint a language model.
    """
    if of == "prototypes" and (corpus is not None or layer is not None):
        raise InputError("--corpus and --layer are for channels and heads: a lens has its text.")
    if of != "prototypes" and lens is not None:
        raise InputError("--lens is for prototypes: channels and heads are read from --corpus.")
    judge = _theme_judge(endpoint, endpoint_model, model)
    from prismlm.probes.themes import layer_units, prototype_units, theme_report

    if of == "prototypes":
        lm, opened = opt.load_with_lens(model, lens)
        drawn, left_out = prototype_units(opened, lm.head.prototypes, units, seed)
        assert opened.corpus is not None
        text, split = opened.corpus, opened.meta.split  # pyright: ignore[reportAssignmentType]
    else:
        checkpoint, sequences = _open(model, corpus, split, tokens, None)
        kind = "channel" if of == "channels" else "head"
        drawn, left_out = layer_units(checkpoint, sequences, kind, layer, units, seed)
        text = sequences.corpus
    settings: dict[str, Any] = {"split": split, "of": of, "judge": judge, "seed": seed}
    settings |= {"name": model.resolve().name, "progress": ConsoleReporter()}
    settings["left_out"] = left_out
    report = theme_report(drawn, text, **settings)
    usage = None if judge is None else judge.session.usage()
    if as_json:
        output.print_json({**report.to_dict(), "asked": usage})
        return
    table = replace(report["units"], rows=report["units"].rows[:MAX_UNITS])
    output.print_report(replace(report, tables={"figures": report["figures"], "units": table}))
    if usage is not None:
        output.say(output.facts_line(usage))


def _theme_judge(url: str | None, name: str | None, model: Path) -> Any:
    if not opt.check_endpoint(url, name):
        return None
    from prismlm.lens.labels.endpoint import Endpoint
    from prismlm.probes.themes import EndpointJudge

    def print_estimate(questions: int, characters: int) -> None:
        size = f"{questions:,} questions of {output.format_count(characters)} characters, some four"
        typer.echo(f"{size} to a token; answers are kept in the model's {ANSWERS}.", err=True)

    if not model.is_dir():
        raise InputError(f"there is no model directory {model}.")
    return EndpointJudge(Endpoint(url or "", name or ""), model / ANSWERS, print_estimate)


@app.command()
def uncertainty_feedback(
    model: opt.Model,
    files: Annotated[list[Path] | None, argument("FILE...", FILES_HELP)] = None,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    text: Annotated[list[str] | None, option("TEXT", "A text to read; may be repeated.")] = None,
    text_column: Annotated[str, option("NAME", "Column of the texts.")] = "text",
    check: Annotated[list[str] | None, option("CHECK", CHECKS_HELP)] = None,
    texts: Annotated[int, option("N", "Texts to read.")] = 64,
    tokens: Annotated[int | None, option("T", "Tokens of each (default: a row, or 256).")] = None,
    signal: Signal = "passes",
    passes: Annotated[int | None, option("N", "For --signal passes (default: as trained).")] = None,
    write: Annotated[int, option("N", "Tokens to write after each text, for hedging.")] = 48,
    temperature: Annotated[float, option("T", "For hedging; 0 takes the top token.")] = 1.0,
    steps: Annotated[int, option("K", "Tokens looked at after a step or a mistake.")] = 8,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Show whether a model uses the uncertainty that is fed back to it.

    Each check stands beside a control. Reads held-out documents of the corpus that the model was
    trained on, or of another, or files, or single texts.
    """
    from prismlm.corpus.documents import Columns, Document
    from prismlm.corpus.read import DocumentReader
    from prismlm.corpus.tokenizer import check_tokenizer_of
    from prismlm.lens.options import trained_length
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.models.device import learned_positions
    from prismlm.probes import uncertainty_feedback as probe

    if sum(map(bool, (files, text, corpus))) > 1:
        raise InputError("texts come from FILE..., --text or --corpus: give one of them.")
    opened, tokenizer = read_checkpoint(model)
    # With one pass every position has the same code, which carries no information.
    default_passes = max(2, probe.feedback_of(opened).passes)
    codes = probe.Signal(signal, default_passes if passes is None else passes)
    lengths: dict[str, Any] = {"tokens": write, "window": steps, "steps": steps}
    options = probe.InspectOptions(codes, **lengths, temperature=temperature, seed=seed)
    row = trained_length(model) or DEFAULT_LENGTH
    if tokens is None:
        tokens = min(row, learned_positions(opened) or row)
    size = {"texts": texts, "tokens": tokens, "seed": seed}
    name = model.resolve().name
    if files:
        title = files[0].name + " …" * (len(files) > 1)
        reader = DocumentReader(files, Columns(text=text_column))
        sample = probe.document_sample(reader, tokenizer, name=title, **size)
    elif text:
        documents = [Document(str(number), content) for number, content in enumerate(text)]
        sample = probe.document_sample(documents, tokenizer, name="--text", **size)
    else:
        training_text = _open_corpus(model, corpus)
        check_tokenizer_of(training_text, tokenizer, name)
        sample = probe.corpus_sample(training_text, split, **size)
    settings: dict[str, Any] = {"options": options, "progress": ConsoleReporter(), "name": name}
    report = probe.inspect_uncertainty_feedback(opened, tokenizer, sample, check or [], **settings)
    _print_report(report, as_json)


@app.command()
def index(
    model: opt.Model,
    lens: opt.Lens = None,
    verify: Annotated[bool, flag("--verify", "Compare the weights with their digests.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show how an index converged, the spread of its documents, and duplicates.

    Every file of the lens is compared with what was written.
    """
    from prismlm.lens.inspection import inspect_lens
    from prismlm.lens.layout import trained_on_words
    from prismlm.models.sidecar import verify_weights

    _, opened = opt.load_with_lens(model, lens)
    verified = {"weights_verified": verify_weights(model)} if verify else {}
    value = {"model": str(model), "lens": str(opened.path), **verified, **inspect_lens(opened)}
    if as_json:
        output.print_json(value)
        return
    points = value["convergence"]
    step = max(1, -(-len(points) // MAX_CURVE_POINTS))
    value["convergence"] = points[::-1][::step][::-1]
    value["spread"] = [
        {"of each prototype": name.replace("_", " ")} | quantiles
        for name, quantiles in value["spread"].items()
    ]
    verdict, _ = value.pop("verdict"), value.pop("by_prototype")
    trained = trained_on_words(value["trained_on"], value["split"])
    output.print_value(value | {"model trained on them": trained})
    note = "Effective number = exp(entropy): equally weighted items with the same spread"
    output.say(note, style="dim")
    output.say(verdict)
    if verify and not value["weights_verified"]:
        output.say("The weights cannot be verified: the model directory has no checksums of them.")
