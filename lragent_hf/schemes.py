"""Who shares what: a scheme is data, and the rest of the package reads it."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SCHEMES", "Scheme", "resolve_scheme"]


@dataclass(frozen=True)
class Scheme:
    """How keys, values and their low-rank (LR) parts are shared between agents.

    Attributes:
        name: the name users pass to ``LoRASharedCache(scheme=...)``.
        kv: ``"shared"``: one copy of K and V (or V_base) for all agents; ``"per_agent"``: one copy each.
        lr: what becomes of the adapter's part X A of the value, [L, rank].
            ``"none"``: V is stored whole; ``"per_agent"``: each agent keeps its own; ``"one_a"``: one LR cache, all
            adapters must have the same A; ``"stacked"``: one LR cache per distinct A, all written by every agent.
        summary: one line for the repr and the docs.
    """

    name: str
    kv: Literal["shared", "per_agent"]
    lr: Literal["none", "per_agent", "one_a", "stacked"]
    summary: str

    def __post_init__(self) -> None:
        if self.kv == "per_agent" and self.lr != "none":
            raise ValueError(f"Scheme {self.name!r}: values that each agent keeps for itself have no LR to share.")

    @property
    def splits_values(self) -> bool:
        """Whether V is stored as base cache plus LR cache (paper, section 3)."""
        return self.lr != "none"

    @property
    def takes_window(self) -> bool:
        """Whether ``handover_window`` means anything: some of what an agent reads was written by another."""
        return self.kv == "shared" and self.lr != "per_agent"


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("non_shared", "per_agent", "none", "K and V per agent: exact, N times the memory"),
        Scheme("full_shared", "shared", "none", "one K and V as first written: the adapters' part is lost"),
        Scheme("base_shared", "shared", "per_agent", "one base cache, an LR cache per agent, built by LR prefill"),
        Scheme("base_lr_shared", "shared", "one_a", "one base cache, one LR cache: adapters share A on v_proj"),
        Scheme("base_lr_stacked", "shared", "stacked", "one base cache, one LR cache per distinct A, no LR prefill"),
    )
}


def resolve_scheme(scheme: "str | Scheme") -> Scheme:
    """The ``Scheme`` of that name; a ``Scheme`` is returned as it is.

    Raises:
        ValueError: no scheme has that name.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"Unknown scheme {scheme!r}. Choose one of {', '.join(map(repr, SCHEMES))}.")
    return SCHEMES[scheme]
