"""Compile the kernels ahead of time, without a GPU, and read from the machine code what they need.

    python -m lragent_hf.kernels.aot [--arch sm_90 ...] [--dtype bf16 ...] [--D 128 ...] [--rank 8 ...] [--mode ...]
                                     [--kind window ...] [--markdown FILE]

One line a kernel: registers, bytes a thread spills and reloads, shared memory and its limit, tensor-core instructions
within loops, global loads of 16 bytes and narrower ones (of the small V_lr tile, where it has too few bytes for 16 a
thread). Exits with 1, and says what, if a kernel breaks a rule of `problems`. Needs triton, not a GPU, and not
TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .attend import attend_kernel
from .configs import ARCHITECTURES, Config, config_for
from .launch import INTERPRETED, OPTIONS, constants, leaves_parts
from .plan import Plan, power_of_two

__all__ = ["Report", "compile_attend", "main", "problems"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MODES = ("prefill", "decode", "split")
SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}
HEADS_PER_GROUP = 4
KINDS = ("plain", "window", "padded", "capped", "lse", "key_lr")

_CUDA_MMA = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|UTC\w*MMA|QGMMA|IMMA)\b")
_CUDA_LOAD = re.compile(r"\b(LDG|LDGSTS)\.(\S+)")
_CUDA_SPILL = re.compile(r"\b(?:STL|LDL)(?:\.[A-Z]\w*)*(?:\.(\d+))?")


@dataclasses.dataclass(frozen=True)
class Report:
    """What one compiled kernel needs. `mma`: tensor-core instructions within loops; loads are of global memory."""

    arch: str
    mode: str
    kind: str
    dtype: str
    D: int
    rank: int
    config: Config
    registers: int
    spills: int
    shared: int
    shared_limit: int
    mma: int
    wide_loads: int
    narrow_loads: int


def compile_attend(
    arch: str, mode: str, dtype: str, D: int, rank: int, config: Config | None = None, **kinds: bool
) -> Report:
    """Compile `attend_kernel` as `launch.py` would call it on a Llama-like cache. rank 0: without LR.

    `kinds`: window, padded, capped, lse, as `launch.constants` takes them; key_lr=True for key LR of rank 8.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: unset it to compile.")
    row = ARCHITECTURES[arch]
    kind = "+".join(name for name in KINDS if kinds.get(name)) or "plain"
    key_lr = kinds.pop("key_lr", False)
    config = config or config_for(row, mode, SIZES[dtype], D, power_of_two(rank), key_lr)
    way = Plan(mode, 1 if mode == "prefill" else HEADS_PER_GROUP, 1 if mode == "prefill" else 8, config)
    split = kinds.pop("split", leaves_parts(way, row, SIZES[dtype], rank))
    statics = constants(
        config, D=D, R=rank, RK=8 if key_lr else 0, rotary=D if key_lr else 0, group=HEADS_PER_GROUP,
        pack=way.pack, split=split, **kinds,
    )  # fmt: skip
    absent = set() if rank else {"p_lr", "p_b", "p_o_lr"}
    absent |= set() if key_lr else {"p_klr", "p_bk", "p_cos", "p_sin"}
    absent |= set() if kinds.get("padded") else {"p_pad", "p_tiles", "p_before"}
    absent |= set() if split else {"p_o_lr"}
    parts = {"p_o", "p_o_lr", "p_lse"} if split else {"p_lse"}
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(attend_kernel.arg_names):
        aligned = False
        if name in statics or name in absent:
            signature[name], values[(place,)] = "constexpr", statics.get(name)
        elif name.startswith("p_"):
            of = {"p_pad": "u8", "p_tiles": "i32", "p_before": "i32", "p_cos": "fp32", "p_sin": "fp32"}.get(name, dtype)
            signature[name], aligned = "*fp32" if name in parts else f"*{of}", True
        elif name in ("scale", "cap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            aligned = name.startswith("s_") and name not in ("s_ln", "s_kln", "s_pb", "s_tb")
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=attend_kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(
        source, target=TARGETS[arch], options={"num_warps": config.warps, "num_stages": config.stages, **OPTIONS}
    )
    registers, spills, mma, wide, narrow = _read_amd(compiled) if arch.startswith("gfx") else _read_cuda(compiled)
    return Report(
        arch,
        mode,
        kind,
        dtype,
        D,
        rank,
        config,
        registers,
        spills,
        compiled.metadata.shared,
        row.shared_memory,
        mma,
        wide,
        narrow,
    )


def problems(report: Report) -> list[str]:
    """The rules a kernel breaks.

    Up to head_dim 128 no spills, shared memory within the limit, tensor cores in the loop for fp16 and bf16, full float32
    products (none on NVIDIA), and with LR out of the way (rank 0) loads of 16 bytes.
    """
    found = []
    if report.D <= 128 and report.spills:
        found.append(f"{report.spills} bytes of spills")
    if report.shared > report.shared_limit:
        found.append(f"{report.shared} bytes of shared memory, the limit is {report.shared_limit}")
    if SIZES[report.dtype] == 2 and not report.mma:
        found.append("no tensor-core instruction in a loop")
    if report.dtype == "fp32" and report.arch.startswith("sm_") and report.mma:
        found.append("tensor-core instructions for float32: TF32")
    threads = report.config.warps * TARGETS[report.arch].warp_size
    narrow_q = report.config.BM * power_of_two(report.D) * SIZES[report.dtype] < 16 * threads  # a tile of few bytes
    if not report.wide_loads or (report.rank == 0 and report.narrow_loads > narrow_q):
        found.append(f"{report.narrow_loads} loads are narrower than 16 bytes")
    return found


def _read_cuda(compiled: triton.compiler.CompiledKernel) -> tuple[int, int, int, int, int]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
        path = os.pathsep.join([str(tools), os.environ.get("PATH", ""), str(found)])
        outputs = [
            subprocess.run(
                [str(tools / "cuobjdump"), flag, file.name], capture_output=True, text=True, check=True,
                env={**os.environ, "PATH": path},
            ).stdout
            for flag in ("-res-usage", "-sass")
        ]  # fmt: skip
    usage = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", outputs[0])}
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", outputs[1])
    code = [(int(address, 16), text) for address, text in lines]
    loops = []
    for address, text in code:
        branch = re.search(r"\bBRA\S*\s.*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            loops.append((int(branch[1], 16), address))
    looped = [text for address, text in code if any(first <= address <= last for first, last in loops)]
    mma = sum(bool(_CUDA_MMA.search(text)) for text in looped)
    widths = [load[2] for _, text in code if (load := _CUDA_LOAD.search(text))]
    wide = sum(".128" in f".{width}" for width in widths)
    # Bytes stored to and loaded from the stack, as the assembler counts them; a frame that nothing touches counts too.
    moved = sum(int(spill[1] or 32) // 8 for _, text in code if (spill := _CUDA_SPILL.search(text)))
    spills = max(moved, usage["STACK"] + usage["LOCAL"])
    return usage["REG"], spills, mma, wide, len(widths) - wide


def _read_amd(compiled: triton.compiler.CompiledKernel) -> tuple[int, int, int, int, int]:
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])

    lines = text.splitlines()
    labels = {line.split(":")[0]: n for n, line in enumerate(lines) if re.match(r"\.?LBB\w+:", line)}
    loops = []
    for n, line in enumerate(lines):
        branch = re.search(r"s_c?branch\w*\s+(\.?LBB\w+)", line)
        if branch and labels.get(branch[1], n) < n:
            loops.append((labels[branch[1]], n))
    mma = sum("v_mfma" in line and any(a <= n <= z for a, z in loops) for n, line in enumerate(lines))
    widths = [found[1] for line in lines if (found := re.search(r"\b(?:global|buffer)_load_(\w+)", line))]
    wide = sum(width in ("dwordx4", "b128") for width in widths)
    # Scalar registers spill into lanes of vector registers; what costs memory is vector spills and scratch.
    spills = max(4 * field("vgpr_spill_count"), field("private_segment_fixed_size"))
    return field("vgpr_count"), spills, mma, wide, len(widths) - wide


_COLUMNS = (
    "arch", "kernel", "kind", "dtype", "D", "rank", "tile", "registers", "spill bytes", "shared KB", "mma", "16 B loads",
    "narrower",
)  # fmt: skip


def _cells(report: Report) -> tuple[str, ...]:
    c, shared, limit = report.config, report.shared / 1024, report.shared_limit / 1024
    return (
        report.arch, report.mode, report.kind, report.dtype, str(report.D), str(report.rank),
        f"{c.BM}x{c.BN} w{c.warps} s{c.stages}", str(report.registers), str(report.spills),
        f"{shared:.0f} of {limit:.0f}", str(report.mma), str(report.wide_loads), str(report.narrow_loads),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> list[Report]:
    """Compile what is asked for, print the table as it grows, and write it as Markdown if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90", "sm_100", "gfx942"], choices=TARGETS)
    parser.add_argument("--dtype", nargs="+", default=["fp16", "bf16", "fp32"], choices=SIZES)
    parser.add_argument("--D", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--rank", nargs="+", type=int, default=[8, 16, 64])
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--kind", nargs="+", default=["plain"], choices=KINDS, help="plain: none of the others")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    asked = parser.parse_args(arguments)
    print(f"triton {triton.__version__}")
    print("  ".join(_COLUMNS), flush=True)
    reports = []
    for report in _all(asked):
        print("  ".join(_cells(report)), flush=True)
        reports.append(report)
        for problem in problems(report):
            print(f"    breaks a rule: {problem}", flush=True)
    if asked.markdown:
        rows = ["| " + " | ".join(cells) + " |" for cells in (_COLUMNS, ["---"] * len(_COLUMNS), *map(_cells, reports))]
        title = f"# attend_kernel compiled ahead of time\n\ntriton {triton.__version__}, {len(reports)} kernels"
        title += ", by `python -m lragent_hf.kernels.aot`. Machine code was read, nothing was timed."
        asked.markdown.write_text(title + "\n\n" + "\n".join(rows) + "\n")
    return reports


def _all(asked: argparse.Namespace) -> Iterable[Report]:
    for arch, kind, mode, dtype, D, rank in itertools.product(
        asked.arch, asked.kind, asked.mode, asked.dtype, asked.D, asked.rank
    ):
        yield compile_attend(arch, mode, dtype, D, rank, None, **({} if kind == "plain" else {kind: True}))


if __name__ == "__main__":
    sys.exit(any(map(problems, main())))
