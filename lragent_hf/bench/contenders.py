"""What is compared: plain ``DynamicCache``s, and every scheme of the library."""

from collections.abc import Sequence
from typing import Any

from transformers import Cache, DynamicCache

from ..cache import LoRASharedCache
from ..schemes import SCHEMES

__all__ = ["AGENTS", "CONTENDERS", "NO_COPY", "VALUE_COPY", "Caches", "make_caches", "scheme_of"]

AGENTS = ("plan", "act", "reflect")
NO_COPY = "base_lr_shared_no_copy"
"""``base_lr_shared`` with ``key_working_copy=False``: of interest with adapters on k_proj."""
VALUE_COPY = "base_lr_shared_value_copy"
"""``base_lr_shared`` with ``value_working_copy=True``: memory for speed, on a CPU."""
_OPTIONS = {NO_COPY: {"key_working_copy": False}, VALUE_COPY: {"value_working_copy": True}}
CONTENDERS = ("three_dynamic", "one_dynamic", *SCHEMES, VALUE_COPY)
"""``three_dynamic``: a cache per agent. ``one_dynamic``: one handed from agent to agent, the adapters' part lost."""


class Caches:
    """The cache of each agent; agents may use the same one."""

    def __init__(self, of: dict[str, Cache]):
        self.of = of

    def part(self) -> None:
        """From now on each agent goes on alone, on a fork of what they shared."""
        self.of = {
            agent: cache.fork() if isinstance(cache, LoRASharedCache) else cache for agent, cache in self.of.items()
        }

    def nbytes(self) -> tuple[int, int]:
        """Bytes in use and bytes reserved. What forks share is counted once."""
        distinct = list({id(cache): cache for cache in self.of.values()}.values())
        reports = [cache.memory_report() for cache in distinct if isinstance(cache, LoRASharedCache)]
        if not reports:
            used = sum(_dynamic_bytes(cache) for cache in distinct)
            return used, used
        shared = max(report.shared_bytes for report in reports) if len(reports) > 1 else 0
        again = shared - sum(report.shared_bytes for report in reports) if len(reports) > 1 else 0
        return (
            sum(report.in_use_bytes for report in reports) + again,
            sum(report.reserved_bytes for report in reports) + again,
        )


def make_caches(model: Any, name: str, recompute: Sequence[int] = (), **options: Any) -> Caches:
    """Empty caches of the contender ``name``.

    Args:
        recompute: layers that ``droidspeak`` recomputes.
        options: of ``LoRASharedCache``.
    """
    if name == "three_dynamic":
        return Caches({agent: DynamicCache() for agent in AGENTS})
    shared: Cache
    if name == "one_dynamic":
        shared = DynamicCache()
    else:
        options = {**_OPTIONS.get(name, {}), **options}
        if name == "droidspeak":
            options = {"recompute_layers": list(recompute), "hidden_cache": True, **options}
        shared = LoRASharedCache(model, scheme=scheme_of(name), **options)
    return Caches(dict.fromkeys(AGENTS, shared))


def scheme_of(name: str) -> str:
    """The scheme of one of the library's contenders."""
    return "base_lr_shared" if name in _OPTIONS else name


def _dynamic_bytes(cache: Any) -> int:
    return sum(rows.nbytes for layer in cache.layers if layer.is_initialized for rows in (layer.keys, layer.values))
