"""A cache in a few lines, for people: scheme, agents, tokens, bytes."""

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["as_html", "as_text"]


def as_text(cache: "LoRASharedCache") -> str:
    """The repr of a cache."""
    facts = _facts(cache)
    width = max(map(len, facts))
    return "LoRASharedCache\n" + "\n".join(f"  {name:{width}}  {value}" for name, value in facts.items())


def as_html(cache: "LoRASharedCache") -> str:
    """The same for notebooks, with the memory report below."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _facts(cache).items())
    return f"<table><caption>LoRASharedCache</caption>{rows}</table>{cache.memory_report()._repr_html_()}"


def _facts(cache: "LoRASharedCache") -> dict[str, str]:
    report, scheme = cache.memory_report(), cache.scheme
    options = f", handover_window={cache.handover_window}" if cache.handover_window else ""
    if scheme.recompute_layers is not None:
        options += f", recompute_layers={list(scheme.recompute_layers)}"
        options += ", with hidden states" if cache.hidden_cache else ""
    if scheme.splits_values and not cache.roster.keys:
        options += ", keys shared whole"
    share = f" ({report.in_use_bytes / report.unshared_bytes:.1%})" if report.unshared_bytes else ""
    return {
        "scheme": f"{scheme.name}{options}: {scheme.summary}",
        "agents": ", ".join(f"{name} ({read:,})" for name, read in cache.agents.items()) or "none yet",
        "tokens": f"{cache.ledger.total:,}" + (f" in {cache.batch_size} rows" if cache.batch_size > 1 else ""),
        "bytes": f"{report.in_use_bytes:,} in use, {report.reserved_bytes:,} reserved",
        "unshared": f"{report.unshared_bytes:,} bytes{share}",
    }
