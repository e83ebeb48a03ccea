"""``report``: from CSVs of the other benchmarks, Markdown tables in the paper's layout beside its numbers, and plots.

Ratios are medians of the ratios within each repeat, not ratios of medians: the machine changes between repeats.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .groups import Group, contenders_of, group_rows, length_labels, lengths_of, median_of, ratio_of, select_rows
from .paper import PAPER_OVERLAP, PAPER_SPEED, PAPER_TTFT, Numbers, paper_at, paper_beyond, paper_model
from .record import Row, read_rows

__all__ = ["as_markdown", "run"]

_AGAINST = ("three_dynamic", "one_dynamic", "non_shared", "full_shared")
_MISSING = "–"


def run(csv: Sequence[Path], out: Path) -> None:
    """Write ``report.md`` and the plots, as PNG and SVG, to the folder ``out``.

    Raises:
        SystemExit: no rows, or matplotlib is missing (the tables are written then).
    """
    groups = group_rows([row for path in csv for row in read_rows(path)])
    if not groups:
        raise SystemExit(f"no measurements in {', '.join(map(str, csv))}")
    out.mkdir(parents=True, exist_ok=True)
    text = as_markdown(groups)
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    try:
        from .plots import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise SystemExit(
            f"{out}/report.md is written. The plots need matplotlib: pip install 'lragent_hf[plot]'"
        ) from None
    for path in draw(groups, out):
        print(path)


def as_markdown(groups: Sequence[Group]) -> str:
    """All groups, one after the other."""
    writers: dict[str, Callable[[Group], Iterator[str]]] = {
        "trace": _trace, "overlap": _overlap, "memory": _memory, "kernel": _kernel, "step": _step,
    }  # fmt: skip
    lines: list[str] = []
    for group in groups:
        same = group[0]
        lines += [f"## {same['benchmark']}: {same['model']}", "", _conditions(group), ""]
        lines += writers[same["benchmark"]](group)
    return "\n".join(lines).rstrip() + "\n"


# --- one benchmark each ------------------------------------------------------------------------------------------------


def _trace(group: Group) -> Iterator[str]:
    same, rows = group
    names, lengths = contenders_of(rows), lengths_of(rows)
    heads = length_labels(lengths)
    for title, field, show in (
        ("Tokens/s", "tokens_per_second", _rate),
        ("TTFT: seconds of prefill, summed over 17 turns", "ttft_s", _seconds),
        ("Tokens prefilled", "prefilled", _count),
        ("Cache in use", "in_use_bytes", _size),
        ("Cache reserved", "reserved_bytes", _size),
        ("Peak memory, growth during the pass", "peak_growth_bytes", _size),
    ):
        if any(row[field] for row in rows):
            cells = {name: [_cell(rows, name, tokens, field, show) for tokens in lengths] for name in names}
            yield from _table(f"{title} (median)", heads, cells)
    model = paper_model(same["model"])
    for title, field, paper in (
        ("Tokens/s", "tokens_per_second", PAPER_SPEED[model]),
        ("TTFT", "ttft_s", PAPER_TTFT[model]),
    ):
        if any(name in same["modules"] for name in ("k_proj", "o_proj")):
            paper = {}  # those numbers are for q_proj and v_proj
        for base in _AGAINST:
            if base in names:
                cells = {name: [_ratios(rows, name, base, n, field, paper) for n in lengths] for name in names}
                yield from _table(f"{title} / {base}'s: ours (the paper's, {model})", heads, cells)


def _overlap(group: Group) -> Iterator[str]:
    _, rows = group
    names = contenders_of(rows)
    shares = sorted({float(row["overlap"]) for row in rows}, reverse=True)
    heads = [f"{share:.0%}" for share in shares]
    for tokens in lengths_of(rows):
        for title, field, show in (
            ("Tokens/s", "tokens_per_second", _rate),
            ("TTFT, s", "ttft_s", _seconds),
            ("Cache in use", "in_use_bytes", _size),
        ):
            cells = {name: [_cell(rows, name, tokens, field, show, share) for share in shares] for name in names}
            yield from _table(f"{title} at {tokens:,} tokens, by the share in common (median)", heads, cells)
        for base in _AGAINST:
            if base not in names:
                continue
            cells = {}
            for name in names:
                cells[name] = []
                for share in shares:
                    mine, bases = (select_rows(rows, n, tokens, share) for n in (name, base))
                    theirs = [PAPER_OVERLAP.get(n, {}).get(share) for n in (name, base)]
                    cells[name].append(_beside(ratio_of(mine, bases, "tokens_per_second"), _ratio(*theirs)))
            yield from _table(f"Tokens/s / {base}'s: ours (the paper's, at 33.7k tokens)", heads, cells)


def _memory(group: Group) -> Iterator[str]:
    same, rows = group
    names, lengths = contenders_of(rows), lengths_of(rows)
    heads = length_labels(lengths)
    sizes: dict[str, list[str]] = {}
    beyond: dict[str, list[str]] = {}
    for name in names:
        sizes[name], beyond[name] = [], []
        for tokens in lengths:
            found = select_rows(rows, name, tokens)
            mark = "~" if found and found[-1]["status"] == "predicted" else ""
            ours, full = (median_of(rows, n, tokens, "in_use_bytes") for n in (name, "full_shared"))
            sizes[name].append(_MISSING if ours is None else mark + _size(ours))
            more = None if ours is None or full is None else (ours - full) / (1 << 30)
            beyond[name].append(_beside(more, paper_beyond(same["model"], name, tokens)))
    yield from _table("Cache at the end of the trace (~: predicted)", heads, sizes)
    title = "GiB beyond full_shared: ours (the paper's table 22: Ministral-8B, whose numbers are those of 32 layers)"
    yield from _table(title, heads, beyond)


def _kernel(group: Group) -> Iterator[str]:
    _, rows = group
    names, lengths = list(dict.fromkeys(row["contender"] for row in rows)), lengths_of(rows)
    for case in dict.fromkeys(row["case"] for row in rows):
        part = [row for row in rows if row["case"] == case]
        cells: dict[str, list[str]] = {}
        for name in names:
            cells[name] = []
            for keys in lengths:
                mine, base = (median_of(part, n, keys, "ms_p50") for n in (name, "sdpa"))
                ratio = _ratio(mine, base)
                cells[name].append(_MISSING if mine is None or ratio is None else f"{mine:.3f} ({ratio:.2f})")
        yield from _table(f"{case}: ms (median; of sdpa's)", [f"{keys} keys" for keys in lengths], cells)


def _step(group: Group) -> Iterator[str]:
    _, rows = group
    names, lengths = contenders_of(rows), lengths_of(rows)
    for part, title in (("step", "One decode step"), ("products", "of it products and attention"),
                        ("cache", "of it the cache's own code")):  # fmt: skip
        here = [row for row in rows if row["case"] == part]
        cells = {name: [_cell(here, name, tokens, "ms_p50", _seconds) for tokens in lengths] for name in names}
        yield from _table(f"{title}: ms (median)", [f"at {tokens:,}" for tokens in lengths], cells)


# --- rows to cells -------------------------------------------------------------------------------------------------------


def _conditions(group: Group) -> str:
    same, rows = group
    said = [same["device_name"], same["dtype"], f"{same['threads']} threads", f"rank {same['rank']}"]
    said += [f"LoRA on {same['modules']}"] if same["modules"] else []
    said += [f"attention {same['attn']}"] if same["attn"] else []
    versions = " ".join(f"{name} {same[name]}" for name in ("torch", "transformers", "peft"))
    dates = sorted({row["date"] for row in rows})
    return (
        f"{', '.join(said)}; {versions}; commit {same['commit']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )


def _cell(
    rows: Sequence[Row], name: str, tokens: int, field: str, show: Callable[[float], str], overlap: float | None = None
) -> str:
    value = median_of(rows, name, tokens, field, overlap)
    found = select_rows(rows, name, tokens, overlap)
    out = sum(row["status"] in ("oom", "skipped") for row in found)
    if value is None:
        return "OOM" if out else _MISSING
    return f"{show(value)} (OOM in {out} of {len(found)})" if out else show(value)


def _ratios(rows: Sequence[Row], name: str, base: str, tokens: int, field: str, paper: dict[str, Numbers]) -> str:
    ours = ratio_of(select_rows(rows, name, tokens), select_rows(rows, base, tokens), field)
    theirs = _ratio(*(paper_at(paper.get(n), tokens) for n in (name, base)))
    return _beside(ours, theirs)


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _beside(ours: float | None, theirs: float | None) -> str:
    left = _MISSING if ours is None else f"{ours:.2f}"
    return left if theirs is None else f"{left} ({theirs:.2f})"


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _size(value: float) -> str:
    return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.1f} MiB"


def _table(title: str, heads: Sequence[str], cells: dict[str, list[str]]) -> Iterator[str]:
    yield f"**{title}**"
    yield ""
    yield f"| | {' | '.join(heads)} |"
    yield f"|---|{'--:|' * len(heads)}"
    for name, row in cells.items():
        yield f"| `{name}` | {' | '.join(row)} |"
    yield ""
