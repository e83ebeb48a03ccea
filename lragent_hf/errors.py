"""Every refusal of the library, by name. Each message says what, where, and what to do instead.

All of them are raised before anything is written: after one, the cache is what it was.
"""

__all__ = [
    "AdapterChangedError",
    "BackendUnavailableError",
    "CacheFileError",
    "CacheFullError",
    "CacheModelMismatchError",
    "LRAgentError",
    "OutsideForwardError",
    "SharedAMismatchError",
    "TrajectoryMismatchError",
    "UnsupportedAdapterError",
    "UnsupportedModelError",
]


class LRAgentError(Exception):
    """Base class of the library's exceptions."""


class UnsupportedModelError(LRAgentError, ValueError):
    """The architecture cannot be served exactly by the scheme asked for (fused qkv, values transformed after v_proj)."""


class UnsupportedAdapterError(LRAgentError, ValueError):
    """An adapter cannot be split exactly (merged, DoRA on k_proj, several trainable copies), or is not known."""


class SharedAMismatchError(UnsupportedAdapterError):
    """``base_lr_shared`` was asked for, but two adapters differ in their A on v_proj."""


class AdapterChangedError(LRAgentError, RuntimeError):
    """An adapter's A changed after its LR cache was written, so what is cached no longer belongs to it."""


class TrajectoryMismatchError(LRAgentError, ValueError):
    """Tokens, ``attention_mask`` or ``position_ids`` do not continue the trajectory that is cached.

    Attributes:
        position: index on the trajectory of the first position that differs, or ``None`` if there is no single one.
        row: batch row of that position, or ``None``.
    """

    def __init__(self, message: str, position: int | None = None, row: int | None = None):
        super().__init__(message)
        self.position = position
        self.row = row


class OutsideForwardError(LRAgentError, RuntimeError):
    """The cache was updated outside a forward of the model it is attached to (detached, or the decoder was bypassed)."""


class CacheModelMismatchError(LRAgentError, ValueError):
    """The cache was made for another model, or holds another batch size, than the forward that uses it."""


class CacheFullError(LRAgentError, ValueError):
    """A forward brings more tokens than ``max_cache_len`` leaves room for."""


class CacheFileError(LRAgentError, ValueError):
    """A saved cache is missing, damaged or of another format: nothing was loaded."""


class BackendUnavailableError(LRAgentError, RuntimeError):
    """An attention backend was asked for by name and cannot serve the call."""
