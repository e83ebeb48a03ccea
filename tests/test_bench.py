"""The benchmarks: what they count, what they refuse, and that a run goes on where it stopped. No test looks at a time."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from lragent_hf import SCHEMES
from lragent_hf.bench import groups, kernel, memory, report, schedule, speed, step, trace, verify
from lragent_hf.bench.__main__ import main
from lragent_hf.bench.contenders import CONTENDERS, make_caches
from lragent_hf.bench.models import load_model
from lragent_hf.bench.record import FIELDS, Row, read_rows
from lragent_hf.bench.shapes import SHAPES
from lragent_hf.storage import SharedLayer

ALONE = ("three_dynamic", "non_shared", "base_shared", "droidspeak")
"""Contenders under which an agent runs what it has not run itself."""


def short_turns(context: int) -> list[trace.Turn]:
    """The 17 turns with few tokens each."""
    return [(agent, min(incoming, 12), min(generated, 2)) for agent, incoming, generated in trace.turns(context)]


def shorten(patch: pytest.MonkeyPatch) -> None:
    for module in (speed, memory, verify):
        patch.setattr(module, "turns", short_turns)


def prefilled(turns: Iterable[trace.Turn], alone: bool, part_at: int | None = None) -> int:
    """Tokens run in prefills, counted turn by turn."""
    read = dict.fromkeys(("plan", "act", "reflect"), 0)
    stop = count = 0
    for agent, incoming, generated in turns:
        stop += incoming
        count += stop - read[agent]
        stop += generated
        for reader in read if not alone else [agent]:
            read[reader] = stop - 1 if reader == agent or part_at is None else min(stop - 1, part_at)
        alone = alone or (part_at is not None and stop - 1 > part_at)
    return count


def options(**changes: Any) -> dict[str, Any]:
    """Of a run on the tiny model."""
    return {
        "model": "tiny", "modules": ["q_proj", "v_proj"], "rank": 8, "dtype": None, "device": "cpu", "attn": "sdpa",
        "repeats": 1, "threads": None, "csv": None, "only": None, **changes,
    }  # fmt: skip


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CSV of a trace of short turns."""
    path = tmp_path_factory.mktemp("bench") / "trace.csv"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        main(["trace", "--model", "tiny", "--context", "16", "--repeats", "1", "--device", "cpu", "--csv", str(path)])
    return path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short turns for whatever asks for the trace."""
    shorten(monkeypatch)


def test_the_trace_has_17_turns_and_the_papers_lengths() -> None:
    assert len(trace.turns(256)) == 17
    assert [trace.total_tokens(trace.turns(n)) for n in (256, 4096, 16384)] == [1936, 17296, 66448]


def test_agents_part_at_the_token_that_the_share_says() -> None:
    turns = [("plan", 6, 4), ("act", 5, 5), ("reflect", 8, 2)]
    assert [trace.divergence(turns, share) for share in (0.0, 0.1, 1 / 3, 0.34, 0.9, 1.0)] == [0, 3, 10, 10, 27, None]


def test_a_row_for_each_contender_with_what_it_prefilled(traced: Path) -> None:
    rows = {row["contender"]: row for row in read_rows(traced)}
    assert list(rows) == list(CONTENDERS)
    for name, row in rows.items():
        assert int(row["prefilled"]) == prefilled(short_turns(16), name in ALONE)
        assert (int(row["tokens"]), row["status"], row["repeat"]) == (trace.total_tokens(short_turns(16)), "ok", "0")
        assert 0 < int(row["in_use_bytes"]) <= int(row["reserved_bytes"])
        assert row["commit"]
        assert row["device_name"]
    assert rows["three_dynamic"]["in_use_bytes"] == rows["non_shared"]["in_use_bytes"]
    assert rows["one_dynamic"]["in_use_bytes"] == rows["full_shared"]["in_use_bytes"]


def test_what_is_there_is_not_measured_again(
    traced: Path, short: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(speed, "load_model", None)  # not even asked for
    before = traced.read_text()
    rows = speed.run_trace([16], **options(csv=traced))
    assert traced.read_text() == before
    assert len(rows) == len(CONTENDERS)
    assert f"{len(CONTENDERS)} measurements are there already" in capsys.readouterr().out


@pytest.mark.parametrize("field", ["commit", "device_name", "dtype"])
def test_rows_of_other_settings_are_left_alone(
    traced: Path, short: None, tmp_path: Path, fake: list[str], field: str, capsys: Any
) -> None:
    path = tmp_path / "other.csv"
    write_csv(path, [{**row, field: "another"} for row in read_rows(traced)])
    rows = speed.run_trace([16], **options(csv=path, only=["full_shared"]))
    assert fake == ["full_shared"]
    assert [row[field] == "another" for row in read_rows(path)] == [True] * len(CONTENDERS) + [False]
    assert len(rows) == 1
    assert "0 measurements are there already" in capsys.readouterr().out


def test_a_row_that_was_cut_short_is_measured_again(traced: Path, short: None, tmp_path: Path, fake: list[str]) -> None:
    path = tmp_path / "torn.csv"
    path.write_text(traced.read_text()[:-40])  # somewhere in the last row
    speed.run_trace([16], **options(csv=path))
    assert fake == [CONTENDERS[-1]]
    assert len(list(read_rows(path))) == len(CONTENDERS)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No model runs; who would have is written down."""
    ran: list[str] = []

    def make(model: Any, name: str, recompute: Any) -> Any:
        ran.append(name)
        return make_caches(load_model("tiny", ["v_proj"], 2, torch.float32, "cpu", "sdpa"), "one_dynamic")

    monkeypatch.setattr(speed, "verify", lambda *args: None)
    monkeypatch.setattr(speed, "make_caches", make)
    monkeypatch.setattr(speed, "run_pass", lambda *args, **kwargs: trace.Pass(2.0, 1.0, 5))
    return ran


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_a_cell(
    fake: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, error: Exception
) -> None:
    """And a longer trace is not tried, in this run or in the next."""

    def run_pass(model: Any, caches: Any, turns: Any, *args: Any, **kwargs: Any) -> trace.Pass:
        if fake[-1] == "full_shared" and trace.total_tokens(turns) > 976:
            raise error
        return trace.Pass(2.0, 1.0, 5)

    monkeypatch.setattr(speed, "run_pass", run_pass)
    asked = options(only=["full_shared", "one_dynamic"], csv=tmp_path / "oom.csv")
    rows = speed.run_trace([32, 24, 16], **asked)
    assert {(row["contender"], row["tokens"]): row["status"] for row in rows} == {
        ("one_dynamic", "976"): "ok", ("one_dynamic", "1008"): "ok", ("one_dynamic", "1040"): "ok",
        ("full_shared", "976"): "ok", ("full_shared", "1008"): "oom", ("full_shared", "1040"): "skipped",
    }  # fmt: skip
    assert len(fake) == 5
    assert all(not row["tokens_per_second"] for row in rows if row["status"] != "ok")
    assert "OOM" in capsys.readouterr().out
    speed.run_trace([64], **asked)
    assert fake[5:] == ["one_dynamic"]


def test_another_error_is_an_error(fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_pass(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(speed, "run_pass", run_pass)
    with pytest.raises(RuntimeError, match="shapes"):
        speed.run_trace([16], **options(only=["full_shared"]))


def test_each_contender_goes_first_in_turn() -> None:
    order = list(schedule.interleaved(["a", "b", "c"], 4))
    assert [name for repeat, name in order if repeat in (0, 1)] == ["a", "b", "c", "b", "c", "a"]
    assert [order[3 * repeat][1] for repeat in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("name", ["non_shared", "full_shared"])
def test_a_wrong_contender_prints_no_speed(
    short: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, name: str
) -> None:
    write_kv = SharedLayer.write_kv
    monkeypatch.setattr(
        SharedLayer, "write_kv", lambda self, stream, start, k, v: write_kv(self, stream, start, k, v + 0.01)
    )
    with pytest.raises(SystemExit, match=rf"{name} is wrong.*No speed"):
        speed.run_trace([16], **options(only=["one_dynamic", name], csv=tmp_path / "none.csv"))
    assert "tokens/s" not in capsys.readouterr().out
    assert not (tmp_path / "none.csv").exists()


def test_a_contender_that_loses_the_adapters_part_is_wrong(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        plain = kwargs.get("backend") == "reference"
        return make_caches(model, name if plain or name != "base_lr_shared" else "full_shared", *args, **kwargs)

    monkeypatch.setattr(verify, "make_caches", make)
    with pytest.raises(SystemExit, match="base_lr_shared is wrong"):
        speed.run_trace([16], **options(only=["base_lr_shared"]))


def test_verification_has_room_for_rounding_in_bfloat16(short: None, capsys: Any) -> None:
    model = load_model("tiny", ["q_proj", "v_proj"], 8, torch.bfloat16, "cpu", "sdpa")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    verify.verify(model, CONTENDERS, [1])
    assert "verified" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("name", [*SCHEMES, memory.OWN_A])
def test_the_formula_is_the_memory_report(short: None, name: str, rank: int) -> None:
    lengths = trace.final_lengths(short_turns(16))
    want = memory.fill(SHAPES["tiny"], name, 16, rank=rank, dtype=torch.bfloat16, recompute=[1])
    assert memory.cache_bytes(SHAPES["tiny"], name, lengths, rank=rank, recompute=[1]) == want


def test_memory_is_predicted_beyond_the_limit(short: None, tmp_path: Path, capsys: Any) -> None:
    asked = {
        "shape": "tiny",
        "context": [16],
        "rank": 8,
        "dtype": "float32",
        "threads": None,
        "csv": tmp_path / "m.csv",
    }
    measured = memory.run(limit=2.0, **{**asked, "csv": None})
    predicted = memory.run(limit=0.0, **asked)
    assert {row["status"] for row in measured} == {"ok"}
    assert {row["status"] for row in predicted} == {"predicted"}
    assert [row["in_use_bytes"] for row in measured] == [row["in_use_bytes"] for row in predicted]
    assert len(memory.run(limit=0.0, **asked)) == len(list(read_rows(tmp_path / "m.csv"))) == len(SCHEMES) + 1


def test_overlap_lies_between_sharing_all_and_sharing_nothing(short: None) -> None:
    names = [name for name in CONTENDERS if name not in ("one_dynamic", "base_lr_shared")]
    rows = speed.run_overlap([16], [1.0, 0.5, 0.0], **options(only=names))
    found = {(row["contender"], row["overlap"]): row for row in rows}
    turns = short_turns(16)
    half = trace.divergence(turns, 0.5)
    own = found["three_dynamic", "1"]
    assert ("three_dynamic", "0.5") not in found  # the same everywhere, so measured once
    for name in names[1:]:
        for overlap, part_at in (("1", None), ("0.5", half), ("0", 0)):
            assert int(found[name, overlap]["prefilled"]) == prefilled(turns, name in ALONE, part_at)
        assert found[name, "0"]["prefilled"] == own["prefilled"]
    for name in ("non_shared", "full_shared"):
        assert found[name, "0"]["in_use_bytes"] == own["in_use_bytes"]
    full = [int(found["full_shared", overlap]["in_use_bytes"]) for overlap in ("1", "0.5", "0")]
    assert full[0] < full[1] < full[2]
    plain = speed.run_trace([16], **options(only=["full_shared"]))
    assert plain[0]["in_use_bytes"] == found["full_shared", "1"]["in_use_bytes"]


def row(**values: Any) -> Row:
    same = {"model": "llama-3.1-8b", "device_name": "a GPU", "commit": "abc", "status": "ok", "overlap": "1"}
    return {**dict.fromkeys(FIELDS, ""), **same, **{key: str(value) for key, value in values.items()}}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[list[Row]], str]:
    """Rows to the text of their report."""

    def write(rows: list[Row]) -> str:
        write_csv(tmp_path / "rows.csv", rows)
        report.run([tmp_path / "rows.csv"], tmp_path / "out")
        return (tmp_path / "out" / "report.md").read_text(encoding="utf-8")

    return write


def test_report_puts_ratios_beside_the_papers(written: Callable[[list[Row]], str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rates = {"non_shared": (90, 100, 110), "full_shared": (250, 260, 240), "base_lr_shared": (240, 230, 200)}
    seconds = {"non_shared": 8.0, "full_shared": 2.0, "base_lr_shared": 3.0}
    rows = [
        row(
            benchmark="trace", tokens=33680, contender=name, repeat=repeat, tokens_per_second=rate, ttft_s=seconds[name],
            in_use_bytes=3 << 30,
        )
        for name, group in rates.items()
        for repeat, rate in enumerate(group)
    ]  # fmt: skip
    rows.append(row(benchmark="trace", tokens=66448, contender="non_shared", repeat=0, status="oom"))
    text = written(rows)
    tables = {part.split("**")[0]: part for part in text.split("\n\n**")}
    assert "| | 33.7k | 66.4k |" in text
    assert "| `base_lr_shared` | 230.0 | – |" in tables["Tokens/s (median)"]
    assert "| `non_shared` | 100.0 | OOM |" in tables["Tokens/s (median)"]
    assert "| `base_lr_shared` | 3.00 GiB | – |" in tables["Cache in use (median)"]
    # 230 / 100, and in the paper 1678.1 / 683.2; of 240 / 250, 230 / 260 and 200 / 240 the second; 1678.1 / 1697.6
    ours = "ours (the paper's, llama-3.1-8b)"
    assert "| `base_lr_shared` | 2.30 (2.46) | – |" in tables[f"Tokens/s / non_shared's: {ours}"]
    assert "| `base_lr_shared` | 0.88 (0.99) | – (0.98) |" in tables[f"Tokens/s / full_shared's: {ours}"]
    # 3 / 8, 9.19 / 38.87
    assert "| `base_lr_shared` | 0.38 (0.24) | – |" in tables[f"TTFT / non_shared's: {ours}"]
    stems = [f"trace_llama-3.1-8b_{field}" for field in ("tokens_per_second", "ttft_s", "in_use_bytes")]
    for stem in stems:
        assert (tmp_path / "out" / f"{stem}.png").stat().st_size > 10_000
        assert (tmp_path / "out" / f"{stem}.svg").exists()


def test_report_never_mixes_commits(written: Callable[[list[Row]], str]) -> None:
    pytest.importorskip("matplotlib")
    one = row(benchmark="trace", tokens=1936, contender="full_shared", repeat=0, tokens_per_second=100)
    text = written([one, {**one, "commit": "def", "tokens_per_second": "300"}])
    assert text.count("## trace") == 2
    assert "| `full_shared` | 100.0 |" in text
    assert "| `full_shared` | 300.0 |" in text


def test_report_of_overlap_memory_and_kernel(written: Callable[[list[Row]], str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row(benchmark="overlap", tokens=5008, contender=name, repeat=0, overlap=share, tokens_per_second=rate)
        for name, share, rate in (
            ("three_dynamic", 1, 50), ("non_shared", 1, 40), ("non_shared", 0, 40), ("full_shared", 1, 80),
            ("full_shared", 0, 44),
        )
    ]  # fmt: skip
    for name, gibibytes in (("full_shared", 8), ("non_shared", 24)):
        rows.append(
            row(
                benchmark="memory", model="ministral-8b", tokens=66448, contender=name, case="predicted",
                status="predicted", in_use_bytes=gibibytes << 30,
            )
        )  # fmt: skip
    for name, ms in (("sdpa", 2.0), ("flash_lora", 1.5)):
        rows.append(row(benchmark="kernel", tokens=4096, contender=name, case="decode", ms_p50=ms, ms_p20=1, ms_p80=3))
    text = written(rows)
    assert "| `three_dynamic` | 50.0 | 50.0 |" in text
    assert "| `full_shared` | 2.00 (2.48) | 1.10 (1.00) |" in text
    assert "| `non_shared` | ~24.00 GiB |" in text
    assert "| `non_shared` | 16.00 (16.23) |" in text  # 39.84 - 23.61
    assert "| `flash_lora` | 1.500 (0.75) |" in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"overlap_llama-3.1-8b_speed_5008.png", "memory_ministral-8b_cache.svg"} <= names


def test_report_without_matplotlib_says_so(
    written: Callable[[list[Row]], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.delitem(__import__("sys").modules, "lragent_hf.bench.plots", raising=False)
    with pytest.raises(SystemExit, match=r"pip install 'lragent_hf\[plot\]'"):
        written([row(benchmark="trace", tokens=1936, contender="full_shared", repeat=0, tokens_per_second=100)])
    assert (tmp_path / "out" / "report.md").exists()


def test_a_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("benchmark,shape\ntrace,small\n")
    with pytest.raises(SystemExit, match="other columns"):
        report.run([tmp_path / "old.csv"], tmp_path / "out")


def test_kernel_verifies_and_writes_rows(tmp_path: Path) -> None:
    asked = {
        "shape": "tiny", "length": [40, 24], "rank": 4, "dtypes": ["float32"], "device": "cpu", "repeats": 1,
        "threads": None, "csv": tmp_path / "k.csv",
    }  # fmt: skip
    rows = kernel.run(**asked)
    assert [row["tokens"] for row in rows[::4]] == ["24", "24", "40", "40"]
    assert len(rows) == len(list(read_rows(tmp_path / "k.csv"))) == 16
    assert kernel.run(**asked) == rows


def test_adapters_with_an_a_of_their_own(short: None) -> None:
    rows = speed.run_trace([16], **options(own_a=True, only=["full_shared", "base_lr_shared", "base_lr_stacked"]))
    assert [row["contender"] for row in rows] == ["full_shared", "base_lr_stacked"]
    assert {row["modules"] for row in rows} == {"q_proj v_proj, own A"}
    lengths = trace.final_lengths(short_turns(16))
    want = memory.cache_bytes(SHAPES["tiny"], memory.OWN_A, lengths, dtype_bytes=4)
    assert int(rows[1]["in_use_bytes"]) == want


def test_a_ratio_is_the_median_of_those_within_a_repeat() -> None:
    """The second repeat met a machine twice as slow; a side measured once stands for all."""
    left = [row(repeat=repeat, seconds=value) for repeat, value in enumerate((3, 8, 5))]
    right = [row(repeat=repeat, seconds=value) for repeat, value in enumerate((1, 2, 4))]
    assert groups.ratio_of(left, right, "seconds") == 3.0  # of 3, 4 and 1.25; the medians' is 2.5
    assert groups.ratio_of(left, right[1:2], "seconds") == 2.5
    assert groups.ratio_of(left, [row(repeat=0, status="oom")], "seconds") is None


def test_a_step_is_divided_and_everything_put_back(short: None, tmp_path: Path) -> None:
    before = [getattr(owner, name) for owner, name, _ in step._COUNTED]
    asked = {
        "length": [24], "only": ["one_dynamic", "base_lr_shared"], "model": "tiny", "modules": ["q_proj", "v_proj"],
        "rank": 4, "dtype": None, "steps": 2, "threads": None, "csv": tmp_path / "s.csv",
    }  # fmt: skip
    rows = step.run(**asked)
    assert [getattr(owner, name) for owner, name, _ in step._COUNTED] == before
    ms = {(row["contender"], row["case"]): float(row["ms_p50"]) for row in rows}
    for name in ("one_dynamic", "base_lr_shared"):
        assert 0 < ms[name, "products"] + ms[name, "cache"] < ms[name, "step"]
    assert ms["one_dynamic", "cache"] == 0 < ms["base_lr_shared", "cache"]
    assert step.run(**asked) == rows
    assert len(list(read_rows(tmp_path / "s.csv"))) == 6
    text = report.as_markdown(groups.group_rows(rows))
    for part, title in (("step", "One decode step"), ("cache", "of it the cache's own code")):
        table = text.partition(f"**{title}: ms (median)**")[2]
        assert f"| `base_lr_shared` | {ms['base_lr_shared', part]:.2f} |" in table.partition("**")[0]


@pytest.mark.parametrize("backend", ["with LR", "without"])
def test_kernel_refuses_a_wrong_contender(monkeypatch: pytest.MonkeyPatch, capsys: Any, backend: str) -> None:
    right = kernel.flash_lora_attention

    def wrong(q: Any, k: Any, v: Any, *lr: Any, **options: Any) -> Any:
        return right(q, k, v, *lr, **options) + (0.01 if bool(lr) == (backend == "with LR") else 0)

    monkeypatch.setattr(kernel, "flash_lora_attention", wrong)
    with pytest.raises(SystemExit, match=r"is wrong.*No time is printed"):
        kernel.run("tiny", [24], 4, ["float32"], "cpu", 1, None, None)
    assert "ms" not in capsys.readouterr().out


def test_the_packaged_model_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LRAGENT_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match=r"smollm2\.load\(\)"):
        load_model("smollm2-135m", ["v_proj"], 2, torch.float32, "cpu", "sdpa")
