"""Attention over a value cache that is kept in two parts, V = V_base + V_lr B. One function, several backends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lragent_hf.attention.blockwise import blockwise_attention
from lragent_hf.attention.reference import reference_attention
from lragent_hf.errors import BackendUnavailableError

__all__ = ["BACKENDS", "flash_lora_attention"]

BACKENDS = ("auto", "reference", "blockwise", "triton")
"""Names that ``backend=`` takes."""

_log = logging.getLogger("lragent_hf")
_said: set[str] = set()
_chosen: dict[str, str] = {}


def flash_lora_attention(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None = None,
    b: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    k_lr: Tensor | None = None,
    b_k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale Q K^T) (V_base + V_lr B): Flash-LoRA-Attention of LRAgent (arXiv 2602.01053).

    Shapes, with Hq a multiple of Hkv (query head h reads kv head h // (Hq / Hkv)) and all in one floating dtype:

        q [B, Hq, Lq, D]    k, v_base [B, Hkv, Lk, D]    v_lr [B, Lk, R]    b [Hkv, R, D] or [B, Hkv, R, D]

    Args:
        q, k, v_base: queries, keys, and the base cache X W0. Views of longer buffers are welcome.
        v_lr, b: the LR cache X A and the adapter's B with its scaling folded in. Both or neither.
        scale: on the scores; D ** -0.5 if None.
        causal: query i sees the keys up to Lk - Lq + i (bottom-right aligned: the queries are the last positions).
        window: the query at position p sees only keys j with p - j < window (if causal: the last ones, with itself).
        key_padding_mask: [B, Lk] bool, True = attend.
        softcap: scores become softcap * tanh(scores / softcap).
        return_lse: also return the log of each row's sum of exponentials (merges attention over parts of a context).
        k_lr, b_k: [B, Lk, Rk] and [Hkv, Rk, D] or [B, Hkv, Rk, D], for an adapter on k_proj: the keys are then
            K + rot(K_lr B_k), rot the rotary embedding that k went through. Both or neither.
        cos, sin: [Lk, Dr / 2] or [B or 1, Lk, Dr / 2], floating: the keys' angles, one for each pair of the Dr columns that
            turn (of transformers' [.., Dr] the first half, or if interleaved every second). None: keys do not turn.
        rotary_interleaved: pairs are columns (2i, 2i + 1), as in GPT-J; otherwise (i, i + Dr / 2), as in Llama.
        backend: "auto", "reference" (the plain definition), "blockwise" (PyTorch) or "triton" (GPU kernels).

    Returns:
        [B, Hq, Lq, D] in q's dtype, and with return_lse also [B, Hq, Lq] in float32 (float64 for float64 inputs).
        A row that sees no key gives zeros, and -inf.

    Raises:
        ValueError: arguments that do not fit together, or an unknown backend.
        BackendUnavailableError: the backend asked for by name cannot run here, or not this call ("triton": gradients,
            dtypes, head_dim and ranks it does not take).
    """
    if not (
        q.dim() == k.dim() == 4
        and k.shape == v_base.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and q.dtype == k.dtype == v_base.dtype
        and q.is_floating_point()
        and q.device == k.device == v_base.device
    ):
        raise ValueError(_wrong_qkv(q, k, v_base))
    if (v_lr is not None or b is not None) and (problem := _wrong_low_rank(k, v_lr, b)):
        raise ValueError(problem)
    if any(t is not None for t in (k_lr, b_k, cos, sin)) and (problem := _wrong_key_low_rank(k, k_lr, b_k, cos, sin)):
        raise ValueError(problem)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a query sees itself), got {window}; None means no window.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}; None means no cap.")
    if key_padding_mask is not None and (
        key_padding_mask.dtype != torch.bool
        or key_padding_mask.shape != (k.shape[0], k.shape[2])
        or key_padding_mask.device != k.device
    ):
        raise ValueError(
            f"key_padding_mask must be bool [B, Lk] = {[k.shape[0], k.shape[2]]} on {k.device}, True = attend; got "
            f"{_show(key_padding_mask)}. An integer mask of ones and zeros: mask.bool(). Other masks: expand "
            "the values (v_base + v_lr[:, None] @ b) and use an attention that takes them."
        )

    return run_backend(
        q, k, v_base, v_lr, b, scale=scale, causal=causal, window=window, key_padding_mask=key_padding_mask,
        softcap=softcap, return_lse=return_lse, k_lr=k_lr, b_k=b_k, cos=cos, sin=sin,
        rotary_interleaved=rotary_interleaved, backend=backend,
    )  # fmt: skip


def run_backend(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None = None,
    b: Tensor | None = None,
    *,
    k_lr: Tensor | None = None,
    b_k: Tensor | None = None,
    backend: str = "auto",
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_lora_attention` for arguments like some that it has checked: in decode its checks cost what a product does."""
    name = backend_for(q.device.type, backend)
    run = _named(name)
    if name == "triton" and (problem := _kernels().unsupported(q, k, v_base, v_lr, b, k_lr=k_lr, b_k=b_k)):
        if backend != "auto":
            raise BackendUnavailableError(f"backend {backend!r}: {problem}.")
        _say(f"flash_lora_attention: backend blockwise ({problem})")
        run = blockwise_attention
    result: Tensor | tuple[Tensor, Tensor] = run(q, k, v_base, v_lr, b, k_lr=k_lr, b_k=b_k, **options)
    return result


def backend_for(device: str, backend: str) -> str:
    """The backend that runs on a device type if this one was asked for."""
    return _automatic(device) if backend == "auto" else backend


@torch.compiler.assume_constant_result
def _automatic(device: str) -> str:
    """The backend for a device type, chosen at its first use and logged."""
    if device not in _chosen:
        _chosen[device] = _choose(device)
    return _chosen[device]


def _choose(device: str) -> str:
    choice, why = "blockwise", f"PyTorch matrix products suit device {device!r}"
    if device == "cuda":
        try:
            _named("triton")
            choice, why = "triton", "a GPU, and the Triton kernels are there"
        except BackendUnavailableError as error:
            why = str(error)
    _say(f"flash_lora_attention: backend {choice} ({why})")
    return choice


def _named(backend: str) -> Callable[..., Any]:
    if backend == "reference":
        return reference_attention
    if backend == "blockwise":
        return blockwise_attention
    if backend == "triton":
        try:
            return _kernels().flash_lora_attention
        except (ImportError, AttributeError) as error:
            raise BackendUnavailableError(
                f"backend 'triton': the kernels cannot be loaded ({error}). Install triton, or take backend='auto'."
            ) from error
    raise ValueError(f"unknown backend {backend!r}; there are 'auto', 'reference', 'blockwise' and 'triton'.")


def _kernels() -> Any:
    import lragent_hf.kernels  # imports triton

    return lragent_hf.kernels


@torch.compiler.assume_constant_result
def _say(message: str) -> None:
    """Log it, the first time."""
    if message not in _said:
        _said.add(message)
        _log.info(message)


def _wrong_low_rank(k: Tensor, v_lr: Tensor | None, b: Tensor | None) -> str | None:
    if v_lr is None or b is None:
        given, missing = ("v_lr", "b") if b is None else ("b", "v_lr")
        return f"{given} is given without {missing}: the low-rank part is V_lr B, pass both or neither."
    batch, kv_heads, Lk, D = k.shape
    if v_lr.dim() != 3 or v_lr.shape[:2] != (batch, Lk):
        return f"v_lr must be [B, Lk, R] = [{batch}, {Lk}, R] (one for all heads), got {_show(v_lr)}."
    rank = v_lr.shape[2]
    if b.shape[-3:] != (kv_heads, rank, D) or not (b.dim() == 3 or (b.dim() == 4 and b.shape[0] == batch)):
        return (
            f"b must be [Hkv, R, D] = {[kv_heads, rank, D]}, or that for each row with B = {batch} in front, got "
            f"{_show(b)}. From PEFT's lora_B.weight [Hkv * D, R]: weight.view(Hkv, D, R).transpose(1, 2) * scaling."
        )
    if not v_lr.dtype == b.dtype == k.dtype or not v_lr.device == b.device == k.device:
        return f"v_lr ({_show(v_lr)}) and b ({_show(b)}) must have k's dtype and device ({_show(k)}): use .to(k)."
    return None


def _wrong_key_low_rank(
    k: Tensor, k_lr: Tensor | None, b_k: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> str | None:
    batch, _, Lk, D = k.shape
    if k_lr is None or b_k is None:
        return (
            "k_lr and b_k: the keys' low-rank part is rot(K_lr B_k), pass both or neither; cos and sin only with them."
        )
    if problem := _wrong_low_rank(k, k_lr, b_k):
        return problem.replace("v_lr", "k_lr").replace("lora_B", "k_proj's lora_B").replace("b must", "b_k must")
    if (cos is None) != (sin is None):
        return "cos and sin: pass both or neither."
    if cos is not None and sin is not None:
        fits = cos.shape == sin.shape and cos.shape[-2:-1] == (Lk,) and 2 <= 2 * cos.shape[-1] <= D
        fits = fits and (cos.dim() == 2 or (cos.dim() == 3 and cos.shape[0] in (1, batch)))
        if (
            not fits
            or not cos.is_floating_point()
            or cos.dtype != sin.dtype
            or not cos.device == sin.device == k.device
        ):
            return (
                f"cos and sin must be floating [Lk, Dr / 2] = [{Lk}, up to {D // 2}], or that for each row with 1 or B = "
                f"{batch} in front, on k's device; got {_show(cos)} and {_show(sin)}. Of transformers' [.., Dr]: the "
                "first half of the columns, or for interleaved pairs every second."
            )
    return None


def _wrong_qkv(q: Tensor, k: Tensor, v_base: Tensor) -> str:
    return (
        "q must be [B, Hq, Lq, D], k and v_base both [B, Hkv, Lk, D], Hq a multiple of Hkv, in one floating dtype on "
        f"one device; got q {_show(q)}, k {_show(k)}, v_base {_show(v_base)}. Heads come before positions: "
        "transpose(1, 2) if yours do not."
    )


def _show(t: Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
