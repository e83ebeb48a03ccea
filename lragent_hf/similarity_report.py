"""The result of ``layer_similarity``: cosines by layer and pair of agents, as a table and a plot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from .figures import blank_figure

__all__ = ["QUANTITIES", "SimilarityReport", "SimilarityRow"]

Pair = tuple[str | None, str | None]

QUANTITIES: dict[str, str] = {
    "base_cache": "base cache", "full_cache": "full cache", "adapter_output": "adapter output", "lr_cache": "LR cache",
    "keys": "keys",
}  # fmt: skip
"""What is compared, and how it is written for people."""

# Okabe and Ito's colours; marker and dash tell them apart in print without colour.
_LOOK: dict[str, tuple[str, str, Any]] = {
    "base_cache": ("#0072B2", "o", "-"),
    "full_cache": ("#E69F00", "s", "--"),
    "adapter_output": ("#D55E00", "v", "-."),
    "lr_cache": ("#009E73", "D", ":"),
    "keys": ("#000000", "x", (0, (5, 1, 1, 1))),
}


@dataclass(frozen=True)
class SimilarityRow:
    """Cosines between what two agents compute of the same tokens in one layer, mean over tokens.

    A token's vector is that of all kv heads. A token where one of the two vectors is zero has no cosine and is left out;
    ``None`` where no token is left.

    Attributes:
        layer: its index; ``None`` for the mean over layers.
        agents: the two; ``None`` is the base model.
        base_cache: X_i W0 and X_j W0 of v_proj, its bias included, as the base cache has them.
        full_cache: V_i and V_j as they leave v_proj.
        adapter_output: s_i (X_i A_i) B_i and s_j (X_j A_j) B_j, with their ``lora_bias`` if they have one; ``None`` where
            one of the two has no LoRA on v_proj.
        lr_cache: X_i A_i and X_j A_j; ``None`` also where ranks differ.
        keys: K_i and K_j as they leave k_proj. The rotary embedding turns both by the same angles, which changes no
            cosine; where a model normalises keys after k_proj, it is the cosine before that.
    """

    layer: int | None
    agents: Pair
    base_cache: float | None
    full_cache: float | None
    adapter_output: float | None
    lr_cache: float | None
    keys: float | None


@dataclass(frozen=True)
class SimilarityReport:
    """The result of ``layer_similarity``.

    Attributes:
        rows: one a layer and pair of agents.
        tokens: how many were compared.
    """

    rows: tuple[SimilarityRow, ...]
    tokens: int

    def means(self) -> tuple[SimilarityRow, ...]:
        """Per pair of agents, the mean over the layers that have a number as in the paper's tables."""
        pairs: dict[Pair, list[SimilarityRow]] = {}
        for row in self.rows:
            pairs.setdefault(row.agents, []).append(row)
        return tuple(
            SimilarityRow(None, pair, **{name: _mean(getattr(row, name) for row in rows) for name in QUANTITIES})
            for pair, rows in pairs.items()
        )

    def table(self, per_layer: bool = False) -> str:
        """In Markdown: the mean over layers, a row a pair of agents; or one a layer and pair."""
        first = ["layer", "agents"] if per_layer else ["agents"]
        lines = [_line([*first, *QUANTITIES.values()]), "|---" * (len(first) + len(QUANTITIES)) + "|"]
        for row in self.rows if per_layer else self.means():
            cells = [str(row.layer)] if per_layer else []
            cells.append(" / ".join("base model" if agent is None else agent for agent in row.agents))
            values = [getattr(row, name) for name in QUANTITIES]
            lines.append(_line(cells + ["-" if value is None else f"{value:.4f}" for value in values]))
        return "\n".join(lines)

    def __str__(self) -> str:
        layers = len({row.layer for row in self.rows})
        return f"Cosine between agents, mean over {self.tokens:,} tokens and {layers} layers:\n\n{self.table()}"

    def plot(self, path: str | Path | None = None) -> Any:
        """Each cosine by layer: the mean over pairs of agents as a line, from the least to the most alike as a band.

        Needs matplotlib.

        Args:
            path: written there if given (PNG, SVG, PDF by its ending).

        Returns:
            The figure.
        """
        figure, axes = blank_figure("SimilarityReport.plot()")
        for place, (name, label) in enumerate(QUANTITIES.items()):
            at: dict[int, list[float]] = {}
            for row in self.rows:
                value = getattr(row, name)
                if value is not None and row.layer is not None:
                    at.setdefault(row.layer, []).append(value)
            if not at:
                continue
            colour, marker, dash = _LOOK[name]
            wide = 3.2 - 0.5 * place  # each thinner than the one below it: lines that coincide show
            means = [fmean(values) for values in at.values()]
            axes.plot(list(at), means, color=colour, marker=marker, linestyle=dash, linewidth=wide, label=label)
            lows, highs = [min(values) for values in at.values()], [max(values) for values in at.values()]
            axes.fill_between(list(at), lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="layer", ylabel="cosine between agents")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]), top=1.03)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False, handlelength=3.5)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None
