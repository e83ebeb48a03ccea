"""The result of an audit: numbers a scheme, as a table, a plot, and a recommendation."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .similarity_report import SimilarityReport

from .figures import blank_figure

__all__ = ["Audit", "Fidelity"]


@dataclass(frozen=True)
class Fidelity:
    """How one scheme did, over all tokens of the turns after the first.

    Attributes:
        scheme, handover_window: which.
        tokens: predictions compared.
        kl: mean KL(reference || scheme), nats a token.
        agreement: share of tokens at which the most likely next token is the same.
        nll, reference_nll: mean negative log-likelihood of the next token that is there, nats.
        prefilled: tokens that agents ran in all, those of the first turn included.
        cache_bytes: bytes in use at the end, mean over trajectories.
        by_turn: mean KL of the first, second, ... turn after the first: whether the error grows. NaN: nothing compared.
        by_trajectory: sum of KL and predictions compared, one pair a trajectory: for intervals.
    """

    scheme: str
    handover_window: int
    tokens: int
    kl: float
    agreement: float
    nll: float
    reference_nll: float
    prefilled: int
    cache_bytes: float
    by_turn: tuple[float, ...]
    by_trajectory: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Audit:
    """The result of ``audit``.

    Attributes:
        rows: one a scheme and window, in the order asked for.
        refused: scheme -> why the library would not run it on these adapters.
        reference: the scheme that was compared with.
        layers: how much alike what the agents cache is, layer by layer; ``None`` if that was not asked for, or refused.
        layers_refused: why layers were not compared, if they were to be.
    """

    rows: tuple[Fidelity, ...]
    refused: dict[str, str] = field(default_factory=dict)
    reference: str = "non_shared"
    layers: "SimilarityReport | None" = None
    layers_refused: str | None = None

    def table(self) -> str:
        """All rows in Markdown."""
        head = "| scheme | window | KL, nats/token | top-1 agreement | NLL | NLL, reference | tokens run | MiB |"
        lines = [head, "|---|---|---|---|---|---|---|---|"]
        lines += [
            f"| {row.scheme} | {row.handover_window} | {row.kl:.4f} | {row.agreement:.1%} | {row.nll:.3f} | "
            f"{row.reference_nll:.3f} | {row.prefilled:,} | {row.cache_bytes / 2**20:.1f} |"
            for row in self.rows
        ]
        lines += [f"| {name} | | refused: {reason} | | | | | |" for name, reason in self.refused.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [self.table()]
        if self.layers is not None:
            parts.append(str(self.layers))
        if self.layers_refused is not None:
            parts.append(f"Layers were not compared: {self.layers_refused}")
        return "\n\n".join(parts)

    def recommend(self, kl_budget: float) -> Fidelity:
        """The cheapest scheme and window with at most ``kl_budget`` nats a token: fewest tokens run, then fewest bytes.

        Raises:
            ValueError: none is within it (says how near the best came), or none ran.
        """
        if not self.rows:
            raise ValueError(f"No scheme ran on these adapters: {self.refused}")
        within = [row for row in self.rows if row.kl <= kl_budget]
        if not within:
            best = min(self.rows, key=lambda row: row.kl)
            last = f"{self.reference}, which is exact" if self.reference == "non_shared" else "the reference"
            raise ValueError(
                f"No scheme is within {kl_budget} nats/token; {best.scheme} with handover_window={best.handover_window} "
                f"comes nearest with {best.kl:.4f}. Audit larger windows (windows=), or use {last}."
            )
        return min(within, key=lambda row: (row.prefilled, row.cache_bytes, row.kl))

    def plot(self, path: str | Path | None = None) -> Any:
        """KL by turn, a line a scheme and window. Needs matplotlib.

        Args:
            path: written there if given (PNG, SVG, PDF by its ending).

        Returns:
            The figure.
        """
        figure, axes = blank_figure("Audit.plot()")
        for row in self.rows:
            window = f", window {row.handover_window}" if row.handover_window else ""
            turns = range(1, len(row.by_turn) + 1)
            axes.plot(turns, row.by_turn, marker="o", label=f"{row.scheme}{window} ({row.kl:.3f})")
        axes.set_xlabel("turn after the first")
        axes.set_ylabel(f"KL to {self.reference}, nats/token")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure
