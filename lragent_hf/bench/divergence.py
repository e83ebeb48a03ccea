"""How far schemes are from a reference, as rows and a table."""

from collections.abc import Sequence

from .answers import label
from .record import Layout, Row

__all__ = ["DIVERGENCE", "table"]

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
    """Rows in Markdown."""
    lines = [
        "| adapters | length | hand-overs | scheme | KL, nats/token | of full_shared's | last turn's KL | top-1 | TTFT, s "
        "| trajectories |",
        "|---|--:|--:|---|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        named = f"{row['adapters']}{', ' if row['options'] else ''}{row['options']}"
        ratio = f"{_two(row['of_full_shared'])} [{_two(row['low'])}, {_two(row['high'])}]"
        last = f"{float(row['last_turn_kl']):.4f}" if row["last_turn_kl"] else ""
        lines.append(
            f"| {named} | {row['length']} | {row['handovers']} | {label(row['scheme'], row['window'])} | "
            f"{float(row['kl']):.4f} | {ratio} | {last} | {float(row['agreement']):.1%} | {float(row['ttft_s']):.2f} | "
            f"{row['distinct']} |"
        )
    return "\n".join(lines)


def _two(number: str) -> str:
    return f"{float(number):.2f}" if number else ""
