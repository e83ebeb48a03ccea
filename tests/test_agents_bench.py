"""``bench accuracy`` and ``bench fidelity``, on a tiny model with adapters that have learnt nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_agents import save_tiny_model
from transformers import AutoModelForCausalLM

from agents import Crew, load_questions, new_agents
from lragent_hf import AgentTrajectory
from lragent_hf.bench import accuracy, fidelity
from lragent_hf.bench.answers import ANSWERS, summary
from lragent_hf.bench.bootstrap import interval, ratio_interval, share
from lragent_hf.bench.crew import adapter_sets, ask_for, digest_of, key_of
from lragent_hf.bench.divergence import DIVERGENCE, prefill_table, table
from lragent_hf.bench.record import read_rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """NAME=FOLDER of random adapters with B unlike zero and an A each."""
    model = new_agents(AutoModelForCausalLM.from_pretrained(base), ["q_proj", "v_proj"], rank=4)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    folder = tmp_path_factory.mktemp("adapters")
    model.save_pretrained(str(folder))
    return f"own={folder}"


def ask(base: str, adapters: str, csv: Path, **more: Any) -> list[dict[str, str]]:
    options: dict[str, Any] = {
        "adapters": [adapters], "data": ["worlds"], "limit": 3, "unseen": 1.0,
        "schemes": ["non_shared", "full_shared", "base_lr_shared"],
        "windows": [0, 16], "model": base, "dtype": "float32", "device": "cpu", "max_turns": 3, "threads": None,
        "csv": csv, "plot": None,
    }  # fmt: skip
    return accuracy.run(**options | more)


def test_every_question_is_asked_under_every_scheme_and_only_once(
    base: str, adapters: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    csv = tmp_path / "a.csv"
    rows = ask(base, adapters, csv, limit=2)
    assert "own: base_lr_shared refuses: " in capsys.readouterr().out
    rows = ask(base, adapters, csv, plot=tmp_path / "a.png")
    cases = {(row["question"], row["scheme"], row["window"]) for row in rows}
    assert len(cases) == len(rows) == len(list(read_rows(csv, ANSWERS))) == 9  # 3 questions, 1 + 2 cases
    assert {(scheme, window) for _, scheme, window in cases} == {
        ("non_shared", "0"), ("full_shared", "0"), ("full_shared", "16")
    }  # fmt: skip
    for row in rows:
        assert (row["answered"], row["turns"], row["level"]) == ("0", "3", "invented")
        assert int(row["prefilled"]) > 0
        assert float(row["tokens"]) / float(row["seconds"]) == pytest.approx(float(row["tokens_per_second"]), rel=1e-4)
    by = {(row["question"], row["scheme"], row["window"]): int(row["prefilled"]) for row in rows}
    for question in {row["question"] for row in rows}:
        assert by[question, "full_shared", "0"] <= by[question, "full_shared", "16"]
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert (tmp_path / "a.svg").is_file()
    monkeypatch.setattr(Crew, "answer", None)  # nothing is asked again
    assert len(ask(base, adapters, csv, schemes=["non_shared", "full_shared"])) == 9


def test_tables_hold_means_intervals_and_paired_differences() -> None:
    def row(question: int, scheme: str, exact: float, f1: float) -> dict[str, str]:
        values = {"adapters": "a", "question": question, "scheme": scheme, "window": 0, "level": "easy",
                  "exact_match": exact, "f1": f1, "answered": 1, "turns": 4, "tokens": 100, "seconds": 2.0, "ttft_s": 0.4,
                  "prefilled": 50, "in_use_bytes": 2**20}  # fmt: skip
        return {key: str(value) for key, value in values.items()}

    f1 = [0.0, 1.0, 0.5, 1.0]
    rows = [row(i, "non_shared", float(value == 1), value) for i, value in enumerate(f1)]
    rows += [row(i, "full_shared", 0.0, value - 0.25) for i, value in enumerate(f1)]
    text = summary(rows)
    assert "**a, easy: 4 questions**" in text
    assert "| full_shared | 0.0 [0.0, 49.0] | 37.5 [" in text  # 0 of 4: Wilson, by hand
    assert "| -25.0 [-25.0, -25.0] | 100.0 [51.0, 100.0] | 4.0 [4.0, 4.0] |" in text  # the same for every question
    assert "| non_shared | 50.0 [15.0, 85.0] |" in text
    assert "| full_shared | 50 | 0.10 | 0.50 | 1.0 |" in text


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_mean(values: list[float]) -> None:
    mean, low, high = interval(values, draws=200)
    assert mean == pytest.approx(sum(values) / len(values))
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    if len(set(values)) == 1:
        assert low == pytest.approx(high)


def test_an_interval_is_as_wide_as_theory_has_it() -> None:
    """A share of one half over 400: 1.96 standard errors of 2.5 %."""
    mean, low, high = interval([0.0, 1.0] * 200)
    assert mean == 0.5
    assert 0.044 < mean - low < 0.054
    assert 0.044 < high - mean < 0.054
    with pytest.raises(ValueError, match="nothing"):
        interval([])


def test_a_share_is_never_certain() -> None:
    assert share([0.0] * 100) == (0.0, 0.0, pytest.approx(0.0370, abs=1e-4))  # 1.96^2 / (100 + 1.96^2)
    assert share([1.0] * 100) == (1.0, pytest.approx(0.9630, abs=1e-4), pytest.approx(1.0))
    mean, low, high = share([0.0, 1.0] * 200)
    assert (mean, low, high) == (0.5, pytest.approx(0.4512, abs=1e-3), pytest.approx(0.5488, abs=1e-3))


def test_a_ratio_of_means_counts_tokens_and_keeps_pairs_together() -> None:
    under = [(4.0, 2), (1.0, 10), (9.0, 3), (2.0, 2)]
    over = [(0.5 * total, tokens) for total, tokens in under]
    assert ratio_interval(over, under) == (0.5, pytest.approx(0.5), pytest.approx(0.5))  # whatever is drawn
    mean, low, high = ratio_interval([(1.0, 2), (8.0, 10), (1.0, 3), (2.0, 2)], under)
    assert mean == pytest.approx(12 / 16)
    assert low < mean < high


def test_questions_are_asked_by_level_and_only_unseen_ones() -> None:
    everything = ask_for(["worlds"], 5, 1.0)
    assert len(everything) == 5 == len({key_of(one) for one in everything})
    unseen = ask_for(["worlds"], 5, 0.2)
    assert len(unseen) == 5
    assert unseen != everything
    trained = {one.question for one in load_questions("worlds", limit=1000)}
    assert not trained & {one.question for one in everything}


def test_other_weights_are_another_set(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "adapter_model.safetensors").write_bytes(b"1")
    one = digest_of(tmp_path)
    (tmp_path / "plan" / "adapter_model.safetensors").write_bytes(b"2")
    assert digest_of(tmp_path) != one


def test_sets_of_adapters_have_a_name_each(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert adapter_sets([str(tmp_path / "one"), f"two={tmp_path}"]) == {"one": tmp_path / "one", "two": tmp_path}
    with pytest.raises(SystemExit, match="No folder"):
        adapter_sets([f"x={tmp_path / 'none'}"])
    with pytest.raises(SystemExit, match="'one'"):
        adapter_sets([str(tmp_path / "one"), f"one={tmp_path}"])


def episode(start: int) -> AgentTrajectory:
    """Ten tokens: plan twice, act, reflect."""
    written = torch.tensor([0, 0, 1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    return AgentTrajectory(
        torch.arange(start, start + 10), [("plan", 3), ("plan", 5), ("act", 6), ("reflect", 10)], written
    )


def test_long_trajectories_are_questions_one_after_the_other() -> None:
    both = [episode(0), episode(100)]
    one = fidelity.joined(both[:1], 0)
    assert list(one.turns) == [("plan", 5), ("act", 6), ("reflect", 10)]  # two turns of plan are one
    long = fidelity.joined(both, 36)
    assert long.input_ids.tolist() == [*range(10), *range(100, 110), *range(10), *range(100, 110)]
    assert list(long.turns)[3:6] == [("plan", 15), ("act", 16), ("reflect", 20)]
    assert long.written is not None
    assert long.written.tolist() == (both[0].written.tolist() if both[0].written is not None else []) * 4
    short = fidelity.joined(both, 12, first=1)
    assert short.input_ids.tolist() == list(range(100, 110))  # the end of a reflect that is nearest
    last = fidelity.cut(long, 2)
    assert list(last.turns) == [("plan", 35), ("act", 36), ("reflect", 40)]
    assert fidelity.cut(long, 0).turns == long.turns


@pytest.fixture
def reflecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that have learnt nothing name no tool: they are taken to say Reflect, so that one hands over to another."""
    monkeypatch.setattr("agents.episode.tool_named", lambda text: "Reflect")


def test_fidelity_measures_what_windows_buy_and_cost(
    base: str, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reflecting: None
) -> None:
    options: dict[str, Any] = {
        "adapters": [adapters], "data": ["worlds"], "questions": 2, "unseen": 1.0, "max_turns": 4,
        "lengths": [0, 1500], "handovers": [0, 1],
        "trajectories": 2, "windows": [0, 5000],
        "schemes": ["non_shared", "full_shared", "base_lr_shared", "base_lr_stacked"],
        "whole_keys": False, "model": base, "dtype": "float32", "device": "cpu", "threads": None,
        "csv": tmp_path / "f.csv", "layers": tmp_path,
    }  # fmt: skip
    rows = fidelity.run(**options)
    assert len(rows) == len(list(read_rows(tmp_path / "f.csv", DIVERGENCE))) == 3 * 5  # three shapes, 1 + 2 + 2
    for row in rows:
        kl, ran = float(row["kl"]), int(row["prefilled"])
        exact = row["scheme"] == "non_shared" or row["window"] == "5000"
        assert kl < 1e-6 if exact else kl > 1e-5
        assert math.isfinite(float(row["ttft_s"]))
        assert float(row["ttft_s"]) > 0
        plain = next(r for r in rows if (r["length"], r["handovers"]) == (row["length"], row["handovers"])
                     and (r["scheme"], r["window"]) == (row["scheme"], "0"))  # fmt: skip
        assert ran >= int(plain["prefilled"])
    assert (tmp_path / "layers_own.png").stat().st_size > 10_000
    assert (tmp_path / "layers_own.md").read_text().count("\n") == 4
    for row in rows:
        if row["scheme"] == "full_shared" and row["window"] == "0":
            assert [row[field] for field in ("of_full_shared", "low", "high")] == ["1", "1", "1"]
        assert (row["last_turn_kl"] == "") == (row["handovers"] == "0")
    monkeypatch.setattr(fidelity, "audit", None)  # nothing is measured again
    monkeypatch.setattr(Crew, "answer", None)
    assert fidelity.run(**options | {"layers": None, "plot": tmp_path / "f.png"}) == rows
    assert (tmp_path / "f.png").stat().st_size > 20_000
    assert (tmp_path / "f.svg").stat().st_size > 10_000
    lines = table(rows).splitlines()[2:]
    assert len(lines) == len(rows)
    assert sum("| a question | all |" in line for line in lines) == 5
    prefills = prefill_table([row for row in rows if row["length"] == "0"]).splitlines()[2:]
    assert "| own | full_shared | 1.0 x | " in prefills[1]
    assert len(fidelity.run(**options | {"lengths": [0], "schemes": ["non_shared"]})) == 1


def test_what_agents_wrote_is_kept_while_nothing_it_depends_on_changes(
    base: str, adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reflecting: None
) -> None:
    options: dict[str, Any] = {
        "adapters": [adapters], "data": ["worlds"], "questions": 2, "unseen": 1.0, "max_turns": 3, "lengths": [0],
        "handovers": [0], "trajectories": 2, "schemes": ["full_shared"], "windows": [0], "whole_keys": False, "model": base,
        "dtype": "float32", "device": "cpu", "threads": None, "csv": tmp_path / "f.csv", "layers": None,
    }  # fmt: skip
    fidelity.run(**options)
    answered: list[str] = []
    answer = Crew.answer

    def counted(self: Crew, question: Any, *args: Any) -> Any:
        answered.append(question.question)
        return answer(self, question, *args)

    monkeypatch.setattr(Crew, "answer", counted)
    fidelity.run(**options | {"windows": [0, 8]})
    assert answered == []
    fidelity.run(**options | {"max_turns": 4})
    assert len(answered) == 2
