"""How far schemes are from a reference, as rows and a table."""

from collections.abc import Sequence

from .answers import label
from .record import Layout, Row

__all__ = ["DIVERGENCE", "prefill_table", "table"]

DIVERGENCE = Layout(
    settings=("benchmark", "model", "dtype", "device", "device_name", "threads", "data", "questions", "max_turns",
              "commit"),
    cell=("adapters", "digest", "options", "length", "handovers", "trajectories", "scheme", "window"),
    values=("distinct", "tokens", "kl", "of_full_shared", "low", "high", "last_turn_kl", "agreement", "nll",
            "reference_nll", "prefilled", "ttft_s", "in_use_bytes", "by_turn"),
)  # fmt: skip
"""``length``: about as many tokens a trajectory; 0: one question. ``handovers``: 0: all there are. ``distinct``: so many
trajectories were there. ``tokens``: predictions compared. ``of_full_shared``: KL as a fraction of full_shared's without a
window, with its 95 % interval. ``by_turn``: KL of the first, second, ... turn after the first. ``ttft_s``: prefill a
hand-over, mean, timed on the first three trajectories."""


def table(rows: Sequence[Row]) -> str:
    """Rows in Markdown. ``tokens run``: as a multiple of ``full_shared``'s without a window.

    Lengths and hand-overs are left out where there is one of them only.
    """
    lines = []
    for row in rows:
        full = next((one for one in rows if _place(one) == (*_place(row)[:-2], "full_shared", "0")), None)
        ran = f"{int(row['prefilled']) / int(full['prefilled']):.1f} x" if full else f"{int(row['prefilled']):,}"
        ratio = _two(row["of_full_shared"])
        if row["low"] and row["distinct"] != "1":  # one trajectory has no spread
            ratio += f" [{_two(row['low'])}, {_two(row['high'])}]"
        lines.append(
            {
                "adapters": f"{row['adapters']}{', ' if row['options'] else ''}{row['options']}",
                "length": str(int(row["length"]) or "a question"),
                "hand-overs": str(int(row["handovers"]) or "all"),
                "scheme": label(row["scheme"], row["window"]),
                "KL, nats/token": f"{float(row['kl']):.4f}",
                "of full_shared's": ratio,
                "last turn's KL": f"{float(row['last_turn_kl']):.4f}" if row["last_turn_kl"] else "",
                "top-1": f"{float(row['agreement']):.1%}",
                "tokens run": ran,
                "trajectories": row["distinct"],
            }
        )
    same = {name for name in ("length", "hand-overs", "last turn's KL") if len({line[name] for line in lines}) < 2}
    names = [name for name in (lines[0] if lines else ()) if name not in same]
    rule = ["---" if name in ("adapters", "scheme", "of full_shared's") else "--:" for name in names]
    cells = [names, rule, *([line[name] for name in names] for line in lines)]
    return "\n".join(f"| {' | '.join(some)} |" for some in cells)


def prefill_table(rows: Sequence[Row]) -> str:
    """Seconds of prefill a hand-over as a multiple of ``full_shared``'s without a window, of the same run, in Markdown."""
    lines = ["| adapters | scheme | TTFT, of full_shared's | KL, nats/token |", "|---|---|--:|--:|"]
    for row in rows:
        full = next(one for one in rows if _place(one) == (*_place(row)[:-2], "full_shared", "0"))
        lines.append(
            f"| {row['adapters']} | {label(row['scheme'], row['window'])} | "
            f"{float(row['ttft_s']) / float(full['ttft_s']):.1f} x | {float(row['kl']):.4f} |"
        )
    return "\n".join(lines)


def _place(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in DIVERGENCE.cell)


def _two(number: str) -> str:
    return f"{float(number):.2f}" if number else ""
