"""Benchmarks of lragent_hf: verified, then timed, all contenders interleaved in one run."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ..schemes import SCHEMES
from . import accuracy, append, branches, compiled, fidelity, kernel, memory, report, speed, step
from .contenders import CONTENDERS, NO_COPY
from .models import MODULES
from .shapes import SHAPES

_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m lragent_hf.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("trace", help="agents taking 17 turns on one trajectory (LRAgent, tables 4 and 5)")
    _add_trace_options(command)

    command = commands.add_parser("overlap", help="the trace, with agents that part midway (LRAgent, table 21)")
    command.add_argument(
        "--overlap", type=float, nargs="+", default=[1.0, 0.8, 0.6, 0.4, 0.2, 0.0], help="shares of the trace in common"
    )
    _add_trace_options(command)

    command = commands.add_parser("kernel", help="attention alone, against sdpa (LRAgent, figure 4)")
    command.add_argument("--shape", choices=list(SHAPES), default="small", help="heads and head_dim")
    command.add_argument("--length", type=int, nargs="+", default=[4096], help="keys")
    command.add_argument("--rank", type=int, default=8)
    command.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=["float32", "bfloat16"])
    command.add_argument("--device", help="default: cuda if there is one")
    command.add_argument("--repeats", type=int, default=15)
    _add_common_options(command)

    command = commands.add_parser("memory", help="bytes of the cache, measured and predicted (LRAgent, table 22)")
    command.add_argument("--shape", choices=list(SHAPES), default="ministral-8b", help="whose cache")
    command.add_argument(
        "--context", type=int, nargs="+", default=[256, 1024, 4096, 16384, 32768], help="tokens of a long observation"
    )
    command.add_argument("--rank", type=int, default=8)
    command.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    command.add_argument("--limit", type=float, default=2.0, help="GiB up to which caches are filled, not predicted")
    _add_common_options(command)

    command = commands.add_parser("step", help="one decode step: what is not matrix products, and whose it is")
    command.add_argument("--length", type=int, nargs="+", default=[1024, 16384], help="tokens in the cache")
    command.add_argument("--model", default="small", help="as for trace")
    command.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="these contenders only")
    command.add_argument("--modules", nargs="+", default=list(MODULES), help="projections with LoRA")
    command.add_argument("--rank", type=int, default=8)
    command.add_argument("--dtype", choices=_DTYPES, help="default: float32 for tiny and small, else bfloat16")
    command.add_argument("--steps", type=int, default=40)
    _add_common_options(command)

    command = commands.add_parser("append", help="cost of appending one token at two lengths")
    command.add_argument("--lengths", type=int, nargs=2, default=(1024, 32768))
    command.add_argument("--repeats", type=int, default=9)

    command = commands.add_parser("branches", help="agents on one context at once, against one after another")
    command.add_argument("--prefix", type=int, default=4096, help="tokens in common")
    command.add_argument("--branches", type=int, default=8)
    command.add_argument("--new", type=int, default=32, help="tokens that each branch writes")
    _add_one_scheme_options(command)

    command = commands.add_parser("compiled", help="decoding compiled on fixed shapes, against decoding as it is")
    command.add_argument("--context", type=int, default=512, help="tokens before the first turn")
    command.add_argument("--turns", type=int, default=12)
    command.add_argument("--new", type=int, default=32, help="tokens that an agent writes in a turn")
    command.add_argument("--device", help="default: cuda if there is one")
    _add_one_scheme_options(command)

    command = commands.add_parser(
        "accuracy", help="agents answer questions under every scheme (LRAgent, tables 3 and 16 to 18)"
    )
    _add_agent_options(command)
    command.add_argument("--limit", type=int, help="questions of each level of each data set, at most")
    command.add_argument("--windows", type=int, nargs="+", default=[0], help="values of handover_window")
    command.add_argument("--plot", type=Path, help="exact match and F1, as PNG and SVG")

    command = commands.add_parser(
        "fidelity", help="KL to non_shared on agents' own trajectories, windows, lengths, hand-overs"
    )
    _add_agent_options(command)
    command.add_argument("--questions", type=int, default=20, help="of each level: answered once, without sharing")
    command.add_argument(
        "--lengths", type=int, nargs="+", default=[0], help="tokens a trajectory; 0: one question each"
    )
    command.add_argument("--handovers", type=int, nargs="+", default=[0], help="the last so many; 0: all there are")
    command.add_argument("--trajectories", type=int, default=20, help="of each length, at most")
    command.add_argument("--windows", type=int, nargs="+", default=[0, 32, 96, 256], help="values of handover_window")
    command.add_argument("--whole-keys", action="store_true", help="with LoRA on k_proj: also key_lr=False")
    command.add_argument("--layers", type=Path, help="folder for plots of cosines, layer by layer")
    command.add_argument("--plot", type=Path, help="KL against windows, lengths and hand-overs, as PNG and SVG")

    command = commands.add_parser("report", help="tables and plots of CSVs, beside the paper's numbers")
    command.add_argument("csv", type=Path, nargs="+")
    command.add_argument("--out", type=Path, default=Path("report"), help="folder for report.md, PNG and SVG")

    options = vars(parser.parse_args(arguments))
    runs: dict[str, Callable[..., object]] = {
        "trace": speed.run_trace, "overlap": speed.run_overlap, "kernel": kernel.run, "memory": memory.run,
        "append": append.run, "branches": branches.run, "compiled": compiled.run, "step": step.run, "report": report.run,
        "accuracy": accuracy.run, "fidelity": fidelity.run,
    }  # fmt: skip
    runs[options.pop("command")](**options)


def _add_trace_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--context", type=int, nargs="+", default=[1024], help="tokens of a long observation: 912 + 4 times that in all"
    )
    command.add_argument(
        "--model", default="small", help=f"random weights of a shape ({', '.join(SHAPES)}), a folder or a hub id; "
        "smollm2-135m is the packaged one, with its own weights"
    )  # fmt: skip
    command.add_argument("--only", nargs="+", choices=[*CONTENDERS, NO_COPY], help="these contenders only")
    command.add_argument("--modules", nargs="+", default=list(MODULES), help="projections with LoRA")
    command.add_argument("--own-a", action="store_true", help="adapters that share no A (without base_lr_shared then)")
    command.add_argument("--rank", type=int, default=8)
    command.add_argument("--dtype", choices=_DTYPES, help="default: float32 for tiny and small, else bfloat16")
    command.add_argument("--device", help="default: cuda if there is one")
    command.add_argument("--attn", default="sdpa", help="the model's attn_implementation")
    command.add_argument("--repeats", type=int, default=3)
    _add_common_options(command)


def _add_one_scheme_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--scheme", choices=[name for name in SCHEMES if name != "droidspeak"], default="base_lr_stacked"
    )
    command.add_argument("--model", default="small", help="as for trace")
    command.add_argument("--modules", nargs="+", default=list(MODULES), help="projections with LoRA")
    command.add_argument("--rank", type=int, default=8)
    command.add_argument("--dtype", choices=_DTYPES, help="default: float32 for tiny and small, else bfloat16")
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--threads", type=int, help="torch threads")


def _add_agent_options(command: argparse.ArgumentParser) -> None:
    schemes = [name for name in SCHEMES if name != "droidspeak"]  # its layers are probed for each model
    command.add_argument(
        "--adapters", nargs="+", required=True, help="NAME=FOLDER with plan, act and reflect in it, each set by itself"
    )
    command.add_argument(
        "--data", nargs="+", default=["hotpotqa"], help="hotpotqa, scienceqa (hub; hotpotqa:train for a split) or files"
    )
    command.add_argument("--schemes", nargs="+", choices=schemes, default=schemes)
    command.add_argument(
        "--model", default="smollm2-135m", help="a folder or a hub id; smollm2-135m is the packaged one"
    )
    command.add_argument(
        "--unseen", type=float, default=1.0, help="ask only the share of questions that train_agents.py holds out (0.2)"
    )
    command.add_argument("--max-turns", type=int, default=45)
    command.add_argument("--dtype", choices=_DTYPES, default="float32")
    command.add_argument("--device", help="default: cuda if there is one")
    _add_common_options(command)


def _add_common_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--threads", type=int, help="torch threads")
    command.add_argument(
        "--csv", type=Path, help="append a row a measurement; what is there already is not measured again"
    )


if __name__ == "__main__":
    main()
