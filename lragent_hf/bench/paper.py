"""The paper's numbers, to stand beside ours: LRAgent, arXiv 2602.01053, on an RTX A6000 with 48 GB.

Contender -> values at growing lengths, from 1.9k tokens on, each about twice the one before. ``None``: out of memory.
"""

__all__ = ["PAPER_MEMORY", "PAPER_OVERLAP", "PAPER_SPEED", "PAPER_TTFT", "paper_at", "paper_beyond", "paper_model"]

Numbers = list[float | None]

_TOKENS = [912 + 4 * context for context in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)]

PAPER_SPEED: dict[str, dict[str, Numbers]] = {
    "llama-3.1-8b": {
        "non_shared": [176.2, 262.4, 401.3, 592.1, 669.2, 683.2, None],
        "full_shared": [193.7, 293.4, 468.5, 808.1, 1246.1, 1697.6, 1826.5],
        "droidspeak": [182.4, 263.5, 412.3, 633.5, 844.2, 931.0, 813.1],
        "base_shared": [169.0, 257.0, 392.3, 617.3, 862.8, 969.6, 823.2],
        "base_lr_shared": [188.7, 279.4, 463.8, 785.7, 1239.4, 1678.1, 1790.6],
    },
    "ministral-8b": {
        "non_shared": [158.9, 231.0, 361.5, 541.2, 610.7, 638.4, None],
        "full_shared": [169.9, 251.4, 420.3, 711.2, 1163.9, 1538.6, 1768.3],
        "droidspeak": [160.9, 251.4, 360.3, 570.2, 785.1, 856.0, None],
        "base_shared": [157.0, 227.4, 364.0, 552.1, 796.5, 885.0, 870.5],
        "base_lr_shared": [164.1, 247.9, 410.9, 703.2, 1159.2, 1521.9, 1757.0],
    },
}
"""Table 4: tokens/s, end to end."""

PAPER_TTFT: dict[str, dict[str, Numbers]] = {
    "llama-3.1-8b": {
        "non_shared": [1.94, 2.55, 3.72, 6.79, 16.38, 38.87, None],
        "full_shared": [1.13, 1.28, 1.63, 2.40, 4.19, 9.13, 23.28],
        "droidspeak": [1.62, 2.17, 3.22, 5.55, 11.15, 25.43, 67.80],
        "base_shared": [1.62, 2.12, 3.06, 5.26, 10.51, 23.91, 67.80],
        "base_lr_shared": [1.13, 1.28, 1.64, 2.43, 4.24, 9.19, 23.35],
    },
    "ministral-8b": {
        "non_shared": [2.02, 2.65, 3.85, 6.84, 17.67, 41.67, None],
        "full_shared": [1.19, 1.35, 1.69, 2.50, 4.37, 9.30, 20.84],
        "droidspeak": [1.65, 2.22, 3.28, 5.69, 11.53, 26.71, None],
        "base_shared": [1.66, 2.19, 3.17, 5.43, 10.85, 25.57, 59.62],
        "base_lr_shared": [1.20, 1.35, 1.71, 2.53, 4.42, 9.38, 20.98],
    },
}
"""Table 5: seconds of prefill, summed over the 17 turns."""

PAPER_MEMORY: dict[str, Numbers] = {
    "non_shared": [15.72, 16.10, 16.87, 18.40, 21.46, 27.59, 39.84, 64.34],
    "full_shared": [15.25, 15.38, 15.65, 16.18, 17.24, 19.36, 23.61, 32.11],
    "droidspeak": [15.26, 15.40, 15.68, 16.25, 17.37, 19.62, 24.12, 33.12],
    "base_shared": [15.26, 15.40, 15.67, 16.23, 17.34, 19.56, 23.99, 32.87],
    "base_lr_shared": [15.25, 15.39, 15.65, 16.19, 17.27, 19.43, 23.74, 32.37],
}
"""Table 22 (figure 5 is its column of 66.4k tokens): GB for Ministral-8B, with 14.95 of weights, 0.11 of adapters, and
activations. The differences between its columns are those of 32 layers with 8 kv heads of 128 in bfloat16, counted in
units of 2^30 bytes; Ministral-8B has 36 layers."""

PAPER_OVERLAP: dict[str, dict[float, float]] = {
    "non_shared": dict.fromkeys((1.0, 0.8, 0.6, 0.4, 0.2, 0.0), 683.2),
    "full_shared": {1.0: 1697.6, 0.8: 1385.1, 0.6: 1121.7, 0.4: 930.3, 0.2: 784.4, 0.0: 682.2},
    "droidspeak": {1.0: 931.0, 0.8: 859.0, 0.6: 789.3, 0.4: 742.4, 0.2: 703.8, 0.0: 677.9},
    "base_shared": {1.0: 969.6, 0.8: 879.9, 0.6: 805.2, 0.4: 752.7, 0.2: 706.3, 0.0: 677.1},
    "base_lr_shared": {1.0: 1678.1, 0.8: 1375.6, 0.6: 1108.2, 0.4: 925.0, 0.2: 764.9, 0.0: 681.6},
}
"""Table 21: tokens/s of LLaMA-3.1-8B at 33.7k tokens, by the share of the context that agents have in common."""


def paper_model(model: str) -> str:
    """The paper's model to compare with: Ministral-8B for Ministrals, else LLaMA-3.1-8B."""
    return "ministral-8b" if "ministral" in model.lower() else "llama-3.1-8b"


def paper_at(numbers: Numbers | None, tokens: int) -> float | None:
    """The number at a length, ``None`` if the paper has none there."""
    at = dict(zip(_TOKENS, numbers or (), strict=False))
    return at.get(tokens)


def paper_beyond(model: str, scheme: str, tokens: int) -> float | None:
    """GB that table 22 has for a scheme beyond full_shared: weights fall out. ``None`` for other models than its own."""
    if model != "ministral-8b":
        return None
    theirs, full = (paper_at(PAPER_MEMORY.get(name), tokens) for name in (scheme, "full_shared"))
    return None if theirs is None or full is None else theirs - full
