"""Who runs: the adapters of an agent, or of each row of a batch, read from the adapted layers themselves."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

__all__ = [
    "Agent",
    "Mixed",
    "agent_label",
    "is_mixed_batch",
    "mixed_hooks",
    "of_rows",
    "read_agent",
    "remove_hooks",
    "select_rows",
]

Agent = tuple[str, ...]
"""The adapters an agent runs with, sorted; ``()`` is the base model."""

_BASE = "__base__"  # PEFT's name for no adapter


class Mixed(tuple[str, ...]):
    """An agent whose batch rows run with adapters of their own: PEFT's ``adapter_names=``.

    As a tuple it is the adapters of all rows, sorted, as any agent's; it equals only one with the same rows.

    Attributes:
        rows: the agent of each batch row.
    """

    rows: tuple[Agent, ...]

    def __new__(cls, rows: Iterable[Agent]) -> "Mixed":
        rows = tuple(rows)
        self = super().__new__(cls, sorted({adapter for row in rows for adapter in row}))
        self.rows = rows
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed) and self.rows == other.rows

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((Mixed, self.rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixed, (self.rows,)

    def rows_of(self, adapter: str) -> list[int]:
        """Batch rows that run with this adapter."""
        return [index for index, row in enumerate(self.rows) if adapter in row]


def of_rows(rows: Sequence[Agent]) -> Agent:
    """The agent that runs each batch row with that row's agent; where they are all the same, that one."""
    return rows[0] if len(set(rows)) == 1 else Mixed(rows)


def select_rows(agent: Agent, rows: Sequence[int]) -> Agent:
    """The same agent once the batch consists of these of its rows."""
    return of_rows([agent.rows[row] for row in rows]) if isinstance(agent, Mixed) else agent


def agent_label(agent: Agent) -> str:
    """How an agent is written for people: ``plan``, ``act+plan``, ``base model``, ``[plan, act]`` row by row."""
    if isinstance(agent, Mixed):
        return f"[{', '.join(map(agent_label, agent.rows))}]"
    return "+".join(agent) or "base model"


def read_agent(layer: Any) -> Agent:
    """The agent this layer runs as now. Merged adapters take part whatever is active, unless adapters are disabled."""
    if layer.disable_adapters:
        return ()
    if is_mixed_batch(layer):
        names = next(
            names for hook in reversed(layer._forward_pre_hooks.values()) if (names := _names(hook)) is not None
        )
        return of_rows([() if name == _BASE else (name,) for name in names])
    names = layer.merged_adapters if getattr(layer, "merged", False) else layer.active_adapters
    return (names[0],) if len(names) == 1 else tuple(sorted(names))


def is_mixed_batch(layer: nn.Module) -> bool:
    """Whether PEFT is about to run each row of the batch with an adapter of its own (``adapter_names=``)."""
    return any(_names(hook) is not None for hook in layer._forward_pre_hooks.values())


def mixed_hooks(root: nn.Module) -> list[tuple[nn.Module, int]]:
    """PEFT's hooks that hand names to the adapted layers below ``root``: (module, key of the hook)."""
    return [
        (module, key)
        for module in root.modules()
        for key, hook in module._forward_pre_hooks.items()
        if _names(hook) is not None
    ]


def remove_hooks(hooks: Iterable[tuple[nn.Module, int]]) -> None:
    """Remove hooks of PEFT's that are still there: it leaves them behind when what runs under them raises."""
    for module, key in hooks:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _names(hook: Any) -> Sequence[str] | None:
    """The names that a pre-hook of PEFT's hands to its layer, one a batch row."""
    names: Sequence[str] | None = (getattr(hook, "keywords", None) or {}).get("adapter_names")
    return names
