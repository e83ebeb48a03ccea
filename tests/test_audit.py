"""The audit: what sharing changes in what agents predict, measured against ``non_shared``."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import NaiveRun, activate, exact_twin
from tiny import active, config, peft_model, run, tokens
from transformers import DynamicCache

from lragent_hf import SCHEMES, AgentTrajectory, audit
from lragent_hf.errors import SharedAMismatchError

IDS = tokens(60)[0]
TURNS = [("plan", 20), ("act", 30), (None, 34), ("reflect", 45), ("plan", 60)]
TRAJECTORY = AgentTrajectory(IDS, TURNS)


def test_it_is_what_the_plain_definitions_differ_by() -> None:
    """KL, agreement and NLL, from logits of plain caches that know nothing of the library, in fp64."""
    model = peft_model().double()
    twin = exact_twin(model)
    model, result = model, audit(model, [TRAJECTORY], schemes=["full_shared", "base_lr_stacked"])
    assert [row.scheme for row in result.rows] == ["full_shared", "base_lr_stacked"]
    for row in result.rows:
        runs = [NaiveRun(twin, scheme) for scheme in ("non_shared", row.scheme)]
        kls, same, nll, start = [], 0, 0.0, 0
        for turn, (agent, stop) in enumerate(TURNS):
            logits = []
            for one in runs:
                names = () if agent is None else (agent,)
                activate(twin, names)
                logits.append(one.forward(names, IDS[None, one.length(names) : stop], None)[0, start - stop :])
            want, got = (each.log_softmax(-1) for each in logits)
            if turn:
                kls.append((want.exp() * (want - got)).sum(-1))
                same += int((want.argmax(-1) == got.argmax(-1)).sum())
                following = IDS[start + 1 : stop + 1]
                nll -= float(got[range(len(following)), following].sum())
            start = stop
        every = torch.cat(kls)
        assert row.tokens == 40 == len(every)
        assert row.kl == pytest.approx(float(every.mean()), rel=1e-4)
        assert row.by_turn == pytest.approx([float(kl.mean()) for kl in kls], rel=1e-4)
        assert row.agreement == same / 40
        assert row.nll == pytest.approx(nll / 39, rel=1e-5)
        assert row.kl > 1e-3
        for one in runs:
            one.detach()


def test_the_exact_schemes_have_no_error_and_windows_bring_it_down() -> None:
    model = peft_model(shared=True).double()
    schemes = ["non_shared", "full_shared", "base_lr_shared", "base_shared"]
    result = audit(model, [TRAJECTORY, AgentTrajectory(IDS[:30], TURNS[:2])], schemes=schemes, windows=[0, 8, 64])
    by = {(row.scheme, row.handover_window): row for row in result.rows}
    assert len(by) == 1 + 3 + 3 + 1
    assert by["non_shared", 0].kl < 1e-9
    assert by["non_shared", 0].nll == pytest.approx(by["non_shared", 0].reference_nll)
    for scheme in ("full_shared", "base_lr_shared"):
        assert by[scheme, 64].kl < 1e-9
        assert by[scheme, 64].agreement == 1.0
        assert by[scheme, 0].kl > by[scheme, 64].kl
        assert by[scheme, 0].prefilled == 90 < by[scheme, 8].prefilled < by[scheme, 64].prefilled
    assert by["base_shared", 0].prefilled > 90
    assert by["non_shared", 0].cache_bytes > by["base_shared", 0].cache_bytes > by["full_shared", 0].cache_bytes


def test_it_recommends_the_cheapest_within_the_budget() -> None:
    model = peft_model(shared=True)
    result = audit(model, [TRAJECTORY], schemes=["non_shared", "base_lr_stacked"], windows=[0, 64])
    stacked, exact = result.rows[1], result.rows[2]
    assert result.recommend(stacked.kl) is stacked
    assert result.recommend(stacked.kl * 0.99) in (exact, result.rows[0])
    with pytest.raises(ValueError, match="nearest"):
        audit(model, [TRAJECTORY], schemes=["base_lr_stacked"]).recommend(0.0)


def test_a_scheme_that_refuses_is_in_the_table_with_its_reason() -> None:
    result = audit(peft_model(), [TRAJECTORY], schemes=["base_lr_shared", "full_shared"])
    assert [row.scheme for row in result.rows] == ["full_shared"]
    assert "layers.0.self_attn.v_proj" in result.refused["base_lr_shared"]
    assert "| base_lr_shared | | refused: " in result.table()
    assert "| full_shared | 0 | " in str(result)


@pytest.mark.parametrize("agent", ["act", None])
def test_it_leaves_the_model_as_it_was(agent: str | None) -> None:
    model = peft_model()

    def logits() -> torch.Tensor:
        return run(model, DynamicCache(), IDS[None])

    def audited() -> torch.Tensor:
        audit(model, [TRAJECTORY], schemes=["full_shared"])
        return logits()

    want = active(model, agent, logits)
    assert torch.equal(active(model, agent, audited), want)


def test_it_leaves_the_agent_below_disabled_adapters_as_it_was() -> None:
    model = peft_model()
    model.set_adapter("plan")
    want = run(model, DynamicCache(), IDS[None])
    with model.disable_adapter():
        audit(model, [TRAJECTORY], schemes=["full_shared"])
    assert torch.equal(run(model, DynamicCache(), IDS[None]), want)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    audit(model, [TRAJECTORY], schemes=["full_shared"])
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_would_change_under_it_is_refused() -> None:
    model = peft_model(lora_dropout=0.5).train()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        audit(model, [TRAJECTORY])
    model.eval()
    model.merge_adapter(["plan"])
    with pytest.raises(ValueError, match="unmerge_adapter"):
        audit(model, [TRAJECTORY])


def test_options_reach_the_caches() -> None:
    model = peft_model(config("qwen3"), target_modules=["k_proj", "v_proj"])
    with pytest.raises(ValueError, match="key_lr=False"):
        audit(model, [TRAJECTORY], schemes=["base_lr_stacked"])
    (row,) = audit(model, [TRAJECTORY], schemes=["base_lr_stacked"], key_lr=False).rows
    assert row.kl > 0


def test_an_audit_against_another_reference() -> None:
    model = peft_model(shared=True).double()
    schemes = ["non_shared", "full_shared", "base_lr_stacked"]
    exact, shared = (
        {row.scheme: row for row in audit(model, [TRAJECTORY], schemes, reference=name, layers=False).rows}
        for name in ("non_shared", SCHEMES["full_shared"])
    )
    assert shared["full_shared"].kl < 1e-9 < shared["non_shared"].kl
    assert shared["full_shared"].agreement == 1
    for row in shared.values():
        assert row.reference_nll == pytest.approx(exact["full_shared"].nll)
    result = audit(model, [TRAJECTORY], ["non_shared"], reference="base_lr_shared", layers=False)
    assert result.reference == "base_lr_shared"
    assert "base_lr_shared" in result.plot().axes[0].get_ylabel()
    with pytest.raises(ValueError, match="or use the reference"):
        result.recommend(0.0)
    with pytest.raises(ValueError, match="Unknown scheme 'best'"):
        audit(model, [TRAJECTORY], reference="best")
    with pytest.raises(SharedAMismatchError):
        audit(peft_model(), [TRAJECTORY], reference="base_lr_shared")


def test_options_of_droidspeak_are_not_for_a_reference_without_them() -> None:
    droidspeak = replace(SCHEMES["droidspeak"], recompute_layers=(1, 2))
    (row,) = audit(peft_model(), [TRAJECTORY], [droidspeak], hidden_cache=True, layers=False).rows
    assert row.kl > 0


@pytest.mark.parametrize(
    ("ids", "turns", "message"),
    [
        (IDS, [("plan", 20), ("act", 20)], "after one that ends at 20"),
        (IDS, [("plan", 61)], "there are 60 tokens"),
        (IDS, [("plan", 20), ("critic", 30)], "'critic' is no adapter"),
        (IDS[None], [("plan", 20)], r"integers \[L\]"),
        (IDS, [("plan", 60)], "no hand-over"),
    ],
)
def test_what_is_no_trajectory_is_said(ids: torch.Tensor, turns: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(peft_model(), [AgentTrajectory(ids, turns)], schemes=["full_shared"])


def test_it_draws_a_line_a_row(tmp_path: Path) -> None:
    result = audit(peft_model(), [TRAJECTORY], schemes=["full_shared", "base_lr_stacked"], windows=[0, 8])
    figure = result.plot(tmp_path / "kl.png")
    lines = figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [list(row.by_turn) for row in result.rows]
    assert (tmp_path / "kl.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_agents_wrote_is_compared_if_that_is_said() -> None:
    """The same predictions as without, chosen by hand: those for tokens that the agent of the turn wrote itself."""
    model = peft_model().double()
    written = torch.zeros(60, dtype=torch.bool)
    written[[5, 19, 20, 22, 25, 29, 31, 40, 44, 59]] = True  # 20 opens a turn: it is another's prediction
    twin = exact_twin(model)
    row = audit(model, [AgentTrajectory(IDS, TURNS, written)], schemes=["full_shared"], layers=False).rows[0]
    runs, by_turn, start = [NaiveRun(twin, scheme) for scheme in ("non_shared", "full_shared")], [], 0
    for agent, stop in TURNS:
        names = () if agent is None else (agent,)
        activate(twin, names)
        logits = [one.forward(names, IDS[None, one.length(names) : stop], None)[0, start - stop :] for one in runs]
        want, got = (each.log_softmax(-1) for each in logits)
        kl = (want.exp() * (want - got)).sum(-1)
        by_turn.append([float(kl[at - start - 1]) for at in range(start + 1, stop) if written[at]])
        start = stop
    for one in runs:
        one.detach()
    kls = [kl for turn in by_turn[1:] for kl in turn]
    assert row.tokens == len(kls) == 7
    assert row.kl == pytest.approx(sum(kls) / 7, rel=1e-4)
    assert row.by_turn == pytest.approx([sum(turn) / len(turn) for turn in by_turn[1:]], rel=1e-4)
    assert row.kl > 1e-3


def test_a_turn_without_a_written_token_has_no_number() -> None:
    written = torch.zeros(60, dtype=torch.bool)
    written[40:44] = True
    row = audit(peft_model(), [AgentTrajectory(IDS, TURNS, written)], schemes=["full_shared"], layers=False).rows[0]
    assert [kl != kl for kl in row.by_turn] == [True, True, False, True]
    with pytest.raises(ValueError, match="no hand-over to audit"):
        audit(peft_model(), [AgentTrajectory(IDS, TURNS, torch.zeros(60, dtype=torch.bool))], layers=False)
    with pytest.raises(ValueError, match=r"written is bool \[60\]"):
        audit(peft_model(), [AgentTrajectory(IDS, TURNS, torch.ones(59, dtype=torch.bool))])
