"""One KV cache for several LoRA agents on one model.

Importing registers nothing and patches nothing; ``LoRASharedCache(model)`` attaches to that model, ``detach`` undoes it.
"""

from ._compat import CACHE_ARG
from .attention import flash_lora_attention
from .audit import audit
from .binding import attach, detach
from .cache import LoRASharedCache
from .droidspeak import droidspeak_layers
from .fidelity import Audit, Fidelity
from .memory import MemoryReport, MemoryRow
from .schemes import DROIDSPEAK_LAYERS, SCHEMES, Scheme
from .shared_a import share_lora_A
from .similarity import layer_similarity
from .similarity_report import SimilarityReport, SimilarityRow
from .turns import AgentTrajectory

__version__ = "0.1.0"

__all__ = [
    "CACHE_ARG",
    "DROIDSPEAK_LAYERS",
    "SCHEMES",
    "AgentTrajectory",
    "Audit",
    "Fidelity",
    "LoRASharedCache",
    "MemoryReport",
    "MemoryRow",
    "Scheme",
    "SimilarityReport",
    "SimilarityRow",
    "attach",
    "audit",
    "detach",
    "droidspeak_layers",
    "flash_lora_attention",
    "layer_similarity",
    "share_lora_A",
]
