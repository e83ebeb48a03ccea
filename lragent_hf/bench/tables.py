"""What the benchmarks print when they are done."""

from collections.abc import Sequence

from .groups import ratio_of
from .record import Row, number
from .stats import percentiles

__all__ = ["print_speed"]

_AGAINST = ("three_dynamic", "one_dynamic", "full_shared")


def print_speed(rows: Sequence[Row], contenders: Sequence[str]) -> None:
    """Tokens/s, TTFT and memory of each contender, a table for each length and overlap."""
    tables: dict[tuple[int, float], dict[str, list[Row]]] = {}
    for row in rows:
        place = int(row["tokens"]), float(row["overlap"])
        tables.setdefault(place, {}).setdefault(row["contender"], []).append(row)
    for (tokens, overlap), groups in sorted(tables.items(), key=lambda item: (item[0][0], -item[0][1])):
        first = next(iter(groups.values()))[0]
        shared = "" if first["benchmark"] == "trace" else f", {overlap:.0%} in common"
        repeats = max(map(len, groups.values()))
        print(
            f"\n{first['model']}, {tokens} tokens{shared}, 17 turns, {first['dtype']}, {first['device_name']}, "
            f"{first['threads']} threads, {repeats} interleaved repeats, rank {first['rank']} on {first['modules']}"
        )
        _print_table({name: groups[name] for name in contenders if name in groups})


def _print_table(groups: dict[str, list[Row]]) -> None:
    rates = {name: _values(group, "tokens_per_second") for name, group in groups.items()}
    against = [name for name in _AGAINST if rates.get(name)]
    print(
        f"{'':23}{'tokens/s p20/p50/p80':>26}{'TTFT sum p20/p50/p80, s':>27}{'prefilled':>10}"
        f"{'cache MiB':>11}{'reserved':>10}{'peak +MiB':>11}{'peak MiB':>10}"
        + "".join(f"{'/ ' + name:>16}" for name in against)
    )
    for name, group in groups.items():
        if not rates[name]:
            print(f"{name:23}{'OOM':>18}")
            continue
        low, mid, high = percentiles(rates[name])
        ttft = "".join(f"{seconds:>9.2f}" for seconds in percentiles(_values(group, "ttft_s")))
        prefilled = int(_values(group, "prefilled")[0])
        memory = "".join(
            f"{_mebibytes(group, field):>{width}}"
            for field, width in (
                ("in_use_bytes", 11),
                ("reserved_bytes", 10),
                ("peak_growth_bytes", 11),
                ("peak_bytes", 10),
            )
        )
        ratios = "".join(f"{_ratio(group, groups[other]):>16}" for other in against)
        print(f"{name:23}{low:>10.0f}{mid:>8.0f}{high:>8.0f}{ttft}{prefilled:>10}{memory}{ratios}")


def _ratio(over: Sequence[Row], under: Sequence[Row]) -> str:
    found = ratio_of(over, under, "tokens_per_second")
    return "-" if found is None else f"{found:.3f}"


def _values(group: Sequence[Row], field: str) -> list[float]:
    return [value for row in group if (value := number(row, field)) is not None]


def _mebibytes(group: Sequence[Row], field: str) -> str:
    values = _values(group, field)
    return f"{percentiles(values)[1] / 2**20:.1f}" if values else "-"
