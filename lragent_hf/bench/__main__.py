"""Command line of the benchmarks."""

import argparse
from collections.abc import Callable
from pathlib import Path

from . import append, kernel, trace


def main() -> None:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m lragent_hf.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("trace", help="agents taking 17 turns on one trajectory (LRAgent, appendix C.6)")
    command.add_argument(
        "--context", type=int, default=1024, help="tokens of each long observation (default: 5.0k in all)"
    )
    command.add_argument("--shape", choices=sorted(trace.SHAPES), default="small", help="random weights of this shape")
    command.add_argument("--only", nargs="+", choices=[*trace.CONTENDERS, trace.NO_COPY], help="these contenders only")
    command.add_argument("--modules", nargs="+", default=list(trace.MODULES), help="projections with LoRA")
    command.add_argument("--rank", type=int, default=8)
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--threads", type=int, default=None, help="torch threads")
    command.add_argument("--csv", type=Path, help="append one row a measurement to this file")

    command = commands.add_parser("append", help="cost of appending one token at two lengths")
    command.add_argument("--lengths", type=int, nargs=2, default=(1024, 32768))
    command.add_argument("--repeats", type=int, default=9)

    command = commands.add_parser("kernel", help="attention alone, against sdpa (LRAgent, figure 4)")
    command.add_argument("--shape", choices=sorted(kernel.SHAPES), default="small", help="heads and head_dim")
    command.add_argument("--length", type=int, default=4096, help="keys")
    command.add_argument("--rank", type=int, default=8)
    command.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    command.add_argument("--repeats", type=int, default=15)
    command.add_argument("--threads", type=int, default=None, help="torch threads")

    options = vars(parser.parse_args())
    runs: dict[str, Callable[..., object]] = {"trace": trace.run, "append": append.run, "kernel": kernel.run}
    runs[options.pop("command")](**options)


if __name__ == "__main__":
    main()
