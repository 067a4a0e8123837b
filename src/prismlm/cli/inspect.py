"""prismlm inspect: how far a lens converged; what prototypes, channels and heads hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import flag, option
from prismlm.cli.progress import ConsoleReporter
from prismlm.errors import InputError, suggest
from prismlm.outputs import output_file, write_text
from prismlm.probes.results import Report, Row, Table, markdown_of

if TYPE_CHECKING:
    from prismlm.corpus import Corpus
    from prismlm.corpus.sequences import Sequences
    from prismlm.probes.channels.report import ChannelReport

# Tokens of a window, of a model whose training rows are not known.
DEFAULT_LENGTH = 256
# How much is printed; JSON has all.
CONVERGENCE_POINTS, CONTEXTS_SHOWN, UNITS_SHOWN = 12, 5, 40
CHANNELS_SHOWN, TOKENS_SHOWN, LAYERS_OF_A_TEXT = 8, 3, 4
CARD = ("category", "role", "tags", "description", "usage", "positions", "score", "nearest_cosine")
ANSWERS = ".themes.answers.jsonl"

Tokens = Annotated[int, option("N", "Tokens to read; 0 for all.", min=0)]
Length = Annotated[int | None, option("T", "Tokens of a window (default: as trained).")]
SORT_HELP = "text: positions that it is the nearest to; score: of the name."
SortBy = Annotated[Literal["text", "usage", "score", "name", "id"], option(None, SORT_HELP)]
Unit = Annotated[Literal["relative", "points"], option(None, "Changes: in %, or in points.")]
LeastVisible = Annotated[int, option("N", "Only queries that see so many tokens of their window.")]
Units = Annotated[
    Literal["prototypes", "channels", "heads"],
    option(None, "Prototypes of a lens, channels of mixers, or attention heads."),
]
Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE...", help=f"Texts in place of a corpus: {opt.TEXT_KINDS}."),
]
Checks = Annotated[
    list[str] | None,
    option(
        "CHECK",
        "ablation, prefill, attention, hedging, mistakes or probe; may be repeated (default: all).",
    ),
]
SignalFrom = Annotated[
    Literal["passes", "recursion"],
    option(None, "The model's own codes: by passes, or by recursion, the true ones."),
]

app = opt.group_with_default(
    "index", "Measure what a lens holds: `prismlm inspect MODEL`; or what channels and heads do."
)


def _corpus(model: Path, corpus: Path | None) -> Corpus:
    """Open a corpus, or the one that a model was trained on."""
    from prismlm.corpus import Corpus
    from prismlm.lens.training_corpus import training_corpus

    return training_corpus(model) if corpus is None else Corpus.open(corpus)


def _open(
    path: Path, corpus: Path | None, split: Any, tokens: int, length: int | None
) -> tuple[Any, Sequences]:
    """Open a model, and the sequences of a corpus that it is to read."""
    from prismlm.corpus.sequences import Sequences
    from prismlm.corpus.tokenizer import check_tokenizer_of
    from prismlm.lens.training_corpus import trained_length
    from prismlm.models.checkpoint import read_checkpoint

    model, tokenizer = read_checkpoint(path)
    opened = _corpus(path, corpus)
    check_tokenizer_of(opened, tokenizer, path.resolve().name)
    row = trained_length(path) or DEFAULT_LENGTH if length is None else length
    return model, Sequences(opened, split, row, tokens or None)


@app.command()
def attention(
    model: opt.Model,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Of at least two tokens.")
    ] = None,
    layer: opt.Layer = None,
    head: Annotated[int | None, option("H", "Only this head of a layer, or of --group.")] = None,
    group: Annotated[str | None, option("GROUP", "Only signal or only noise heads.")] = None,
    out: Annotated[Path | None, option("FILE", "Write a PNG; needs the extra plot.")] = None,
    overwrite: opt.Overwrite = False,
    roles: Annotated[
        bool, flag("--roles", "Which heads look for subjects, objects, verbs")
    ] = False,
    cases: Annotated[Path | None, option("FILE", "Sentences for --roles, as JSON lines.")] = None,
    draws: Annotated[int | None, option("N", "Of random words, for --roles.", min=1)] = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Show what attention heads look at along a text, or which of them look for a role.

    Heads may be those of signal/noise attention or of any Hugging Face decoder.
    """
    if (text is None) != roles:
        had = "both" if roles else "neither"
        raise InputError(f"expected either a text or --roles, got {had}.")
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
            from prismlm.pages.attention_plots import save_maps

            save_maps(maps, out)
            output.report_written(out)
        value = {"text": text, "maps": [_attention_figures(one) for one in maps]}
        columns = {"head": "", "itself": ".2f", "strongest on others: from → to": ""}
        table = Table(text, columns, tuple(map(_attention_row, maps)))
    output.print_json({"model": str(model)} | value) if as_json else output.print_table(table)


def _attention_figures(one: Any) -> Row:
    strongest = [link._asdict() for link in one.strongest()]
    return one.to_dict() | {"on_itself": one.on_itself(), "strongest": strongest}


def _attention_row(one: Any) -> Row:
    named = [output.token_text(token) for token in one.tokens]
    links = (f"{named[x.source]} → {named[x.target]} {x.weight:.2f}" for x in one.strongest())
    strongest = {"strongest on others: from → to": "   ".join(links)}
    return {"head": one.head.title, "itself": one.on_itself()} | strongest


def _search_roles(
    model: Any, tokenizer: Any, path: Path | None, **search: Any
) -> tuple[Row, Table]:
    """Return which heads look for a role, beside the same search with random weights."""
    from prismlm.probes.heads import roles

    search["progress"] = ConsoleReporter()
    cases = roles.load_role_cases(path)
    found = roles.search_roles(model, tokenizer, cases, **search)
    random = roles.untrained(model, search["seed"])
    control = roles.search_roles(random, tokenizer, cases, **search)["roles"]
    source = None if path is None else str(path)
    value = {"cases": source, **found.to_dict(), "untrained": control}
    table = roles.best_of_roles(found)
    table.facts["with_random_weights"] = control
    return value, table


@app.command()
def prototypes(
    model: opt.Model,
    prototype: Annotated[
        int | None, typer.Argument(metavar="ID", help="Show all of this one.")
    ] = None,
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
        known = sorted({one for one in opened.categories if one is not None})
        raise InputError(
            f"no prototype of {opened.path} has the category {category!r}: expected "
            f"{', '.join(known) or 'none, since `prismlm label` has not named them'}."
            f"{suggest(category, known)}"
        )
    whole = catalogue.of_category(catalogue.search(search, sort, everything=True), category or "")
    found = whole if everything else whole[opened.listed[whole]]
    rows = [catalogue.row(one) for one in found[:limit].tolist()]
    if as_json:
        output.print_json({"total": len(found), "items": rows})
        return
    columns = {"id": "", "name": "", "category": "", "positions": ",", "usage": ".2%"}
    output.print_rows("", columns | {"score": ".0%"}, rows)
    if len(found) > len(rows):
        output.say(f"… {len(found) - len(rows):,} more: --limit N", style="dim")
    if few := len(whole) - len(found):
        output.say(
            f"{few:,} with fewer than {MIN_PLACES} places are not listed: --all", style="dim"
        )


def _print_card(card: Row) -> None:
    from prismlm.cli.trace import print_passage
    from prismlm.lens.text import Around

    output.say(f"#{card['id']} {card['name']}", style="bold")
    output.print_facts({name: card[name] for name in CARD if card[name]})
    output.say("\nRaises more than others do, the most distinctive first; in logits", style="bold")
    output.say("  " + "  ".join(f"{token!s} {value:+.2f}" for token, value in card["tokens"]))
    output.say("\nWhere it fires", style="bold")
    for place in card["contexts"][:CONTEXTS_SHOWN]:
        texts = (place[name] or "" for name in ("before", "token", "after"))
        print_passage(output.stdout_console(), Around(*texts))
        origin = (place["doc_id"], place["source"], place["license"])
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
    beside: Annotated[Path | None, option("MODEL", "Metrics of a second model beside it.")] = None,
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
    from prismlm.corpus.sequences import Sequences
    from prismlm.models.checkpoint import read_checkpoint

    opened, tokenizer = read_checkpoint(model)
    if html is not None or channel is not None:
        _check_mixers(opened, layer, channel)
    sequences = None
    if corpus is not None or text is None or beside is not None:
        sequences = Sequences(_corpus(model, corpus), split, max_tokens=max_tokens or None)
    layers = None if layer is None else (layer,)
    report = _channel_report(model, opened, tokenizer, sequences, text, layers=layers)
    other = None
    if beside is not None:
        # It may have another depth, so it is read in all layers.
        other = _channel_report(beside, *read_checkpoint(beside), sequences, None)
    if html is not None:
        from prismlm.pages.channels import channel_page
        from prismlm.pages.frame import write_page

        write_page(channel_page(report, opened, sequences.corpus if sequences else None), html)
        output.report_written(html)
    if out is not None:
        _draw_channels(report, other, (layer, channel), out)
    if as_json:
        output.print_json(_channel_figures(report, other, channel))
    else:
        _print_channels(report, other, layer, channel)


def _check_mixers(model: Any, layer: int | None, channel: int | None) -> None:
    from prismlm.models.decoders.mixers import check_channel, check_layer, mixers_of

    mixers = mixers_of(model)
    if layer is not None and channel is not None:
        check_layer(len(mixers), layer)
        check_channel(mixers[layer].channels, layer, channel)


def _channel_report(
    path: Path, model: Any, tokenizer: Any, sequences: Any, text: str | None, **options: Any
) -> ChannelReport:
    from prismlm.probes.channels import ReportOptions, channel_report

    how: dict[str, Any] = {"options": ReportOptions(**options), "progress": ConsoleReporter()}
    return channel_report(model, tokenizer, sequences, text=text, name=path.resolve().name, **how)


def _draw_channels(
    report: ChannelReport, beside: ChannelReport | None, place: tuple[Any, Any], out: Path
) -> None:
    from prismlm.pages.channel_plots import figures

    for name, figure in figures(report, beside, None if None in place else place).items():
        with output_file(out / f"{name}.svg") as temporary:
            # Without a date, the same report gives the same file.
            figure.savefig(temporary, format="svg", metadata={"Date": None})
        output.report_written(out / f"{name}.svg")


def _channel_figures(
    report: ChannelReport, beside: ChannelReport | None, channel: int | None
) -> Row:
    value: Row = {**report.to_dict(), "beside": None}
    if channel is not None:
        for layer in value["layers"]:
            layer["channels"] = [c for c in layer["channels"] if c["channel"] == channel]
    if beside is not None:
        other, keys = beside.to_dict(), ("layer", "shared_gates", "metrics")
        layers = [{key: layer[key] for key in keys} for layer in other["layers"]]
        value["beside"] = {"model": other["model"], "of": other["of"], "layers": layers}
    return value


def _print_channels(
    report: ChannelReport, beside: ChannelReport | None, layer: int | None, channel: int | None
) -> None:
    """Print a report: some channels of every layer, all of one layer, or one channel in full."""
    output.say(report.model + "\n", style="bold")
    if report.of == "heads":
        output.say(
            "No prototype mixers, so there are no channels: these are norms of value heads.\n"
        )
    if report.corpus is not None:
        read = report.corpus
        output.say(
            f"{output.format_count(read.positions)} tokens of {read.name}, {read.split}\n",
            style="dim",
        )
        for one in (report, beside):
            if one is not None:
                output.print_table(one.metrics)
        for table in report.tables[1:] if channel is None else ():
            output.print_table(table)
    for one in report.to_dict()["layers"]:
        if channel is not None:
            output.say(f"Layer {one['layer']}", style="bold")
            output.print_value(one["channels"][channel])
        elif one["channels"]:
            _print_layer(one, all_shown=layer is not None)
    if report.text is not None:
        _print_text(report.text, channel)


def _print_layer(layer: Row, *, all_shown: bool) -> None:
    """Print channels: all, or some spread evenly over the half-lives."""
    chosen = sorted(layer["channels"], key=lambda channel: channel["half_life"] or 0.0)
    if not all_shown:
        step = max(1.0, (len(chosen) - 1) / (CHANNELS_SHOWN - 1))
        chosen = [chosen[round(step * i)] for i in range(min(CHANNELS_SHOWN, len(chosen)))]
    rows: list[Row] = []
    for channel in chosen:
        first = channel["sequences"][0]["tokens"] if channel["sequences"] else []
        shown = {"writes_most": channel["tokens"][:TOKENS_SHOWN], "in first sequence": first}
        texts = {
            n: "  ".join(output.token_text(t["text"]) for t in some) for n, some in shown.items()
        }
        rows.append(channel | {name: text or None for name, text in texts.items()})
    columns = {"channel": "", "half_life": ".2f", "repetition": ".2f"}
    columns |= {"writes_most": "", "in first sequence": ""}
    title = f"Layer {layer['layer']}: {len(chosen)} of {len(layer['channels'])}; all with --layer"
    output.print_rows(title, columns, rows)


def _print_text(text: Any, channel: int | None) -> None:
    """Print what each token writes and reads: the largest gates, or those of a channel."""
    tokens = [output.token_text(token) for token in text.text.tokens]
    rows: list[Row] = [{"token": token} for token in tokens]
    if channel is None:
        for curves in text.curves[-LAYERS_OF_A_TEXT:]:
            for what, gate in (("writes", curves.write), ("reads", curves.read)):
                largest = (x.tolist() for x in gate.max(-1))
                for row, value, number in zip(rows, *largest, strict=True):
                    row[f"layer {curves.layer} {what}"] = f"#{number:<3} {value:.2f}"
        title = "The text: the channel each token writes and reads most"
        output.print_rows(title, dict.fromkeys(rows[0], ""), rows)
        return
    (curves, *_), memory = text.curves, text.curves[0].memory(channel)
    for i, row in enumerate(rows):
        strongest = int(memory[i].argmax())
        share = memory[i, strongest].item()
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
    find: Annotated[bool, flag("--find", "Find it, by what writes at the cases' targets.")] = False,
    corpus: Annotated[Path | None, option("DIR", "The corpus that --find reads.")] = None,
    max_tokens: Annotated[int, option("N", "Tokens that --find reads; 0: all.", min=0)] = 500_000,
    controls: Annotated[int, option("N", "Control channels drawn beside each channel.")] = 5,
    by: Unit = "relative",
    minimum: Annotated[float, option("P", "Leave out cases whose target is less probable.")] = 0.01,
    first_token: Annotated[
        bool, flag("--first-token", "Of a target of several tokens, the first.")
    ] = False,
    seed: opt.Seed = 0,
    out: Annotated[Path | None, option("DIR", "Write JSON, Markdown and Parquet.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Disturb a channel and show what becomes of words, beside channels drawn as controls."""
    chosen = opt.parse_layer_pairs("--channel", "CHANNEL", channel)
    if bool(chosen) == find:
        raise InputError("expected either channels (--channel L:K) or --find.")
    if find and corpus is None:
        raise InputError("--find needs the text to find channels in: --corpus DIR.")
    opt.check_output_files(*models, corpus, cases, overwrite=overwrite, directory=out)
    from prismlm.corpus import Corpus
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.probes.channels.case_files import load_cases
    from prismlm.probes.channels.concepts import concept_in_model
    from prismlm.probes.channels.effects import TableOptions

    options = TableOptions(
        controls=controls, minimum_probability=minimum, first_token=first_token, seed=seed
    )
    read = load_cases(cases)
    asked: dict[str, Any] = {"channels": chosen, "options": options, "progress": ConsoleReporter()}
    asked |= {"corpus": Corpus.open(corpus) if corpus else None, "max_tokens": max_tokens or None}
    found = [concept_in_model(*read_checkpoint(m), read, name=str(m), **asked) for m in models]
    value = {"cases": cases, "models": [item.to_dict() for item in found]}
    if out is not None:
        _write_interventions(out, found, value, by)
    output.print_json(value) if as_json else _print_interventions(found, by)


def _write_interventions(out: Path, found: list[Any], value: Row, by: Any) -> None:
    output.write_json(out / "interventions.json", value)
    for place, item in enumerate(found):
        stem = f"{place}-{Path(item.name).resolve().name}"
        item.table.to_parquet(out / f"{stem}.parquet")
        tables = [item.table.summary(), *(item.table.cases(c, by) for c in item.table.controls)]
        write_text(out / f"{stem}.md", "\n".join(map(markdown_of, tables)))
        output.report_written(out / f"{stem}.md")


def _print_interventions(found: list[Any], by: Any) -> None:
    """Print every model's channel and tables, and how many models have such a channel."""
    for item in found:
        output.say(item.name, style="bold")
        if item.found is not None:
            output.print_table(item.found)
        if item.heldout_difference is not None:
            output.say(
                f"the same channel on held-out text: {item.heldout_difference:+.2f}, "
                f"{item.heldout_count:,} occurrences\n"
            )
        for place in item.table.controls:
            output.print_table(item.table.cases(place, by))
        output.print_table(item.table.summary())
    emerged = [item.emerges for item in found if item.emerges is not None]
    if len(emerged) > 1:
        output.say(f"p below 0.05 in {sum(emerged)} of {len(emerged)} models")


@app.command()
def heads(
    models: opt.Models,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    tokens: Tokens = 20_000,
    length: Length = None,
    layer: opt.Layer = None,
    least_visible: LeastVisible = 16,
    out: Annotated[Path | None, option("FILE.csv", "Write a row a head.")] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Show how far each head looks and what at; signal heads beside noise heads.

    Of several models, such as seeds, it shows each one's comparison and whether they agree.
    """
    opt.check_output_files(*models, corpus, overwrite=overwrite, csv=out)
    from prismlm.probes.heads import across_models, head_report, write_heads

    options: dict[str, Any] = {"layers": None if layer is None else (layer,)}
    options |= {"least_visible": least_visible, "progress": ConsoleReporter()}
    reports: list[Report] = []
    for path in models:
        opened = _open(path, corpus, split, tokens, length)
        reports.append(head_report(*opened, name=path.resolve().name, **options))
    compared = [report["comparison"] for report in reports if "comparison" in report.tables]
    across = across_models(compared) if len(compared) > 1 else None
    if out is not None:
        write_heads(reports, out)
        output.report_written(out)
    if as_json:
        shown = [report.to_dict() for report in reports]
        output.print_json({"models": shown, "across": across and across.to_dict()})
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
    positions: Annotated[int, option("N", "Positions of coding rates and of content.")] = 2048,
    distortion: Annotated[float, option("EPSILON", "Of coding rates.")] = 0.5,
    order: Annotated[int, option("N", "Of small denominators: n and m from 1 to this.")] = 22,
    context: Annotated[int | None, option("T", "Of the loss (default: twice a row's).")] = None,
    documents: Annotated[int, option("N", "Documents that the loss is read of.")] = 32,
    seed: opt.Seed = 0,
    loss_only: Annotated[bool, flag("--loss-only", "Only the loss by length.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
    from prismlm.lens.training_corpus import trained_length
    from prismlm.probes.heads import SpectraOptions, spectra_report

    opened = _open(model, corpus, split, tokens, length)
    trained = trained_length(model)
    options = SpectraOptions(positions, distortion, order, context, trained, documents, seed)
    how: dict[str, Any] = {"loss_only": loss_only, "progress": ConsoleReporter()}
    report = spectra_report(*opened, name=model.resolve().name, options=options, **how)
    output.print_json(report.to_dict()) if as_json else output.print_report(report)


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
    from prismlm.probes.themes import channels_or_heads, theme_report
    from prismlm.probes.themes import prototypes as prototype_units

    given: dict[str, Any] = {"name": model.resolve().name, "of": of, "judge": judge, "seed": seed}
    given["progress"] = ConsoleReporter()
    if of == "prototypes":
        lm, opened = opt.load_with_lens(model, lens)
        found = prototype_units(opened, lm.head.prototypes, units, seed)
        assert opened.corpus is not None
        given["split"] = opened.meta.split
        report = theme_report(found, opened.corpus, **given)
    else:
        checkpoint, sequences = _open(model, corpus, split, tokens, None)
        given["split"] = sequences.split
        kind = "channel" if of == "channels" else "head"
        found = channels_or_heads(checkpoint, sequences, kind, layer, units, seed)
        report = theme_report(found, sequences.corpus, **given)
    asked = None if judge is None else judge.session.asked()
    if as_json:
        output.print_json({**report.to_dict(), "asked": asked})
        return
    tables = {name: report[name] for name in ("figures", "units")}
    tables["units"] = replace(tables["units"], rows=tables["units"].rows[:UNITS_SHOWN])
    output.print_report(replace(report, tables=tables))
    if asked is not None:
        output.say(output.facts_line(asked))


def _theme_judge(url: str | None, name: str | None, model: Path) -> Any:
    if not opt.check_endpoint(url, name):
        return None
    from prismlm.lens.labels.endpoint import Endpoint
    from prismlm.probes.theme_judges import EndpointJudge

    def announce(questions: int, characters: int) -> None:
        typer.echo(
            f"{questions:,} questions, {output.format_count(characters)} characters, about four per "
            f"token; answers are kept in the model's {ANSWERS}.",
            err=True,
        )

    if not model.is_dir():
        raise InputError(f"there is no model directory {model}.")
    return EndpointJudge(Endpoint(url or "", name or ""), model / ANSWERS, announce)


@app.command()
def uncertainty_feedback(
    model: opt.Model,
    files: Files = None,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    text: Annotated[list[str] | None, option("TEXT", "A text to read; may be repeated.")] = None,
    text_column: Annotated[str, option("NAME", "Of texts in files.")] = "text",
    check: Checks = None,
    texts: Annotated[int, option("N", "Texts to read.")] = 64,
    tokens: Annotated[int | None, option("T", "Tokens of each (default: a row, or 256).")] = None,
    signal: SignalFrom = "passes",
    passes: Annotated[int | None, option("N", "Of --signal passes (default: the model's).")] = None,
    write: Annotated[int, option("N", "Tokens to write after each text, for hedging.")] = 48,
    temperature: Annotated[float, option("T", "Of what is written; 0 takes the top token.")] = 1.0,
    steps: Annotated[int, option("K", "Tokens looked at after a step or a mistake.")] = 8,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Show whether a model uses the uncertainty that is fed back to it.

    Each check stands beside a control. Reads held-out documents of the corpus that the model was
    trained on, or of another, or files, or single texts.
    """
    from prismlm.lens.training_corpus import trained_length
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.models.positions import learned_positions
    from prismlm.probes import uncertainty_feedback as probe

    if sum(map(bool, (files, text, corpus))) > 1:
        raise InputError("texts come from FILE..., --text or --corpus: give one of them.")
    opened, tokenizer = read_checkpoint(model)
    # With one pass every position has the same code, which carries no information.
    own = max(2, probe.feedback_of(opened).passes)
    chosen = probe.Signal(signal, own if passes is None else passes)
    looked: dict[str, Any] = {"tokens": write, "window": steps, "steps": steps}
    options = probe.InspectOptions(chosen, **looked, temperature=temperature, seed=seed)
    row = trained_length(model) or DEFAULT_LENGTH
    if tokens is None:
        tokens = min(row, learned_positions(opened) or row)
    drawn = {"texts": texts, "tokens": tokens, "seed": seed}
    if files or text:
        sample = _sample_of(files or [], text or [], text_column, tokenizer, drawn)
    else:
        from prismlm.corpus.tokenizer import check_tokenizer_of

        read = _corpus(model, corpus)
        check_tokenizer_of(read, tokenizer, model.resolve().name)
        sample = probe.corpus_sample(read, split, **drawn)
    how: dict[str, Any] = {"options": options, "progress": ConsoleReporter()}
    report = probe.inspect_uncertainty_feedback(
        opened, tokenizer, sample, check or [], name=model.resolve().name, **how
    )
    output.print_json(report.to_dict()) if as_json else output.print_report(report)


def _sample_of(
    files: list[Path], texts: list[str], column: str, tokenizer: Any, drawn: dict[str, int]
) -> Any:
    """Return texts of files, or of the command line, as tokens of the model."""
    from prismlm.corpus.documents import Columns, Document
    from prismlm.corpus.read import DocumentReader
    from prismlm.probes.uncertainty_feedback import document_sample

    if files:
        name = files[0].name + (" …" if len(files) > 1 else "")
        return document_sample(
            DocumentReader(files, Columns(text=column)), tokenizer, name=name, **drawn
        )
    given = [Document(str(number), text) for number, text in enumerate(texts)]
    return document_sample(given, tokenizer, name="--text", **drawn)


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
    from prismlm.lens.convergence import inspect_lens
    from prismlm.lens.layout import trained_on_words
    from prismlm.models.sidecar import verify_weights

    _, opened = opt.load_with_lens(model, lens)
    verified = {"weights_verified": verify_weights(model)} if verify else {}
    value = {"model": str(model), "lens": str(opened.path), **verified, **inspect_lens(opened)}
    if as_json:
        output.print_json(value)
        return
    # Of a long curve some points; of the spread, which each prototype has, quantiles.
    points = value["convergence"]
    step = max(1, -(-len(points) // CONVERGENCE_POINTS))
    value["convergence"] = points[::-1][::step][::-1]
    spread = value["spread"].items()
    value["spread"] = [{"of each prototype": name.replace("_", " ")} | of for name, of in spread]
    verdict, _ = value.pop("verdict"), value.pop("by_prototype")
    trained = trained_on_words(value["trained_on"], value["split"])
    output.print_value(value | {"model trained on them": trained})
    output.say(
        "Effective number = exp(entropy): equally weighted items with the same spread", style="dim"
    )
    output.say(verdict)
    if verify and not value["weights_verified"]:
        output.say("The weights cannot be verified: an older prismlm noted no checksums of them.")
