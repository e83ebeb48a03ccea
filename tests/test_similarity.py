"""Cosines between what agents cache, layer by layer, against agents run one by one and matrices multiplied out."""

import copy
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoHaConfig, LoraConfig, PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from tiny import active, base_model, config, hook_census, peft_model, raising, randomise, run, tokens
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GPT2Config

from lragent_hf import (
    AgentTrajectory,
    LoRASharedCache,
    SimilarityReport,
    SimilarityRow,
    audit,
    detach,
    layer_similarity,
    similarity,
)
from lragent_hf.errors import UnsupportedAdapterError, UnsupportedModelError

IDS = tokens(40)[0]
TURNS = [("plan", 12), ("act", 25), (None, 30), ("reflect", 40)]
TRAJECTORY = AgentTrajectory(IDS, TURNS)
TRAJECTORY_OF_PLAN = AgentTrajectory(IDS, [("plan", 40)])
TWO = AgentTrajectory(IDS, [("plan", 20), ("act", 40)])
ALL = ["plan", "act", None, "reflect"]
QKV = ["q_proj", "k_proj", "v_proj"]
NAMES = ("base_cache", "full_cache", "adapter_output", "lr_cache", "keys")


# --- the plain definition ---------------------------------------------------------------------------------------------


class Alone:
    """One agent's forward over the tokens by itself: what its projections were given, and the cache that came of it."""

    def __init__(self, model: PeftModel, agent: str | None, ids: Tensor):
        self.agent, self.cache = agent, DynamicCache()
        self.layers = [layer.self_attn for layer in model.get_base_model().get_decoder().layers]
        self.inputs: list[Tensor] = []
        handles = [
            layer.v_proj.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0][0].detach()))
            for layer in self.layers
        ]
        active(model, agent, lambda: run(model, self.cache, ids[None]))
        for handle in handles:
            handle.remove()
        self.config = model.peft_config.get(agent)

    @torch.no_grad()
    def project(self, layer: int, child: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """X W0, X A and s (X A) B of one projection, by their matrices."""
        x, projection = self.inputs[layer], getattr(self.layers[layer], child)
        plain = getattr(projection, "base_layer", projection)
        base = x @ plain.weight.T + (0 if plain.bias is None else plain.bias)
        if self.agent not in getattr(projection, "lora_A", ()):
            return base, None, None
        lr = x @ projection.lora_A[self.agent].weight.T
        return base, lr, self.config.lora_alpha / self.config.r * (lr @ projection.lora_B[self.agent].weight.T)

    def parts(self, layer: int) -> dict[str, Tensor | None]:
        """Each quantity of that layer, [L, features]."""
        base, lr, added = self.project(layer, "v_proj")
        keys, _, keys_added = self.project(layer, "k_proj")
        full = base if added is None else base + added
        torch.testing.assert_close(full, self.cached(layer, "values"))
        keys = keys if keys_added is None else keys + keys_added
        return {"base_cache": base, "full_cache": full, "adapter_output": added, "lr_cache": lr, "keys": keys}

    def cached(self, layer: int, name: str) -> Tensor:
        """What a plain cache holds, all heads of a token beside each other: keys are turned by then."""
        return getattr(self.cache.layers[layer], name)[0].transpose(0, 1).flatten(1)


def by_hand(model: PeftModel, trajectories: Sequence[Tensor], agents: Sequence[str | None]) -> dict[Any, float | None]:
    """(layer, pair, quantity) -> mean cosine."""
    model = copy.deepcopy(model).double()
    cosines: dict[Any, list[Tensor]] = {}
    count = model.config.num_hidden_layers
    for ids in trajectories:
        runs = [Alone(model, agent, ids) for agent in agents]
        for layer in range(count):
            parts = [one.parts(layer) for one in runs]
            for (left, one), (right, other) in combinations(zip(agents, parts, strict=True), 2):
                for name in NAMES:
                    a, b = one[name], other[name]
                    found = cosines.setdefault((layer, (left, right), name), [])
                    if a is not None and b is not None and a.shape == b.shape:
                        found.append(F.cosine_similarity(a, b, dim=-1, eps=0.0))
    return {key: float(torch.cat(found).mean()) if found else None for key, found in cosines.items()}


def as_dict(report: SimilarityReport) -> dict[Any, float | None]:
    return {(row.layer, row.agents, name): getattr(row, name) for row in report.rows for name in NAMES}


def assert_same(got: dict[Any, float | None], want: dict[Any, float | None], rel: float = 1e-9) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == (None if value is None else pytest.approx(value, rel=rel, abs=rel)), key


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], QKV, "all-linear"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # qwen2 has a bias on v_proj and k_proj
def test_it_is_what_each_agent_computes_by_itself(kind: str, targets: Any, shared: bool) -> None:
    model = peft_model(config(kind), shared=shared, target_modules=targets).double()
    others = [IDS[:17].flip(0), IDS]
    want = by_hand(model, others, ALL)
    got = layer_similarity(model, [AgentTrajectory(ids, ()) for ids in others], ALL)
    assert got.tokens == 57
    assert_same(as_dict(got), want)
    middle = [want[1, ("plan", "act"), name] for name in NAMES]
    assert len({round(value, 3) for value in middle}) == 5  # the numbers tell the quantities apart


def test_turning_the_keys_changes_no_cosine() -> None:
    model = peft_model(target_modules=QKV).double()
    left, right = (Alone(model, agent, IDS) for agent in ("plan", "act"))
    for row in layer_similarity(model, [TRAJECTORY], ["plan", "act"]).rows:
        keys = [one.cached(row.layer, "keys") for one in (left, right)]
        # the angles' cos and sin are of fp32, so that they turn by nearly a rotation
        assert row.keys == pytest.approx(float(F.cosine_similarity(*keys, dim=-1).mean()), rel=1e-6)


def test_agents_are_those_that_take_turns_over_the_tokens_of_turns() -> None:
    model = peft_model().double()
    turns = [("act", 10), (None, 20), ("act", 33)]
    assert_same(
        as_dict(layer_similarity(model, [AgentTrajectory(IDS, turns)])), by_hand(model, [IDS[:33]], ["act", None])
    )


def test_adapters_that_share_a_and_not_b() -> None:
    """Before the first layer all agents are the same, so there X A is too, and what B makes of it is not."""
    report = layer_similarity(peft_model(shared=True).double(), [TRAJECTORY])
    for row in report.rows:
        pair = {agent for agent in row.agents if agent is not None}
        if len(pair) == 2:
            assert (row.lr_cache == pytest.approx(1.0)) == (row.layer == 0)
            assert abs(row.adapter_output) < 0.9
        assert (row.base_cache == pytest.approx(1.0)) == (row.layer == 0)
    own = layer_similarity(peft_model(adapters={"plan": {}, "act": {}}).double(), [TWO])
    assert abs(own.rows[0].lr_cache) < 0.9


def test_an_agent_without_lora_on_v_proj() -> None:
    adapters = {"plan": {}, "looks": {"target_modules": ["q_proj"]}, "low": {"layers_to_transform": [0]}}
    model = peft_model(adapters=adapters).double()
    agents = ["plan", "looks", "low", None]
    report = layer_similarity(model, [TRAJECTORY_OF_PLAN], agents)
    assert_same(as_dict(report), by_hand(model, [IDS], agents))
    by = {(row.layer, row.agents): row for row in report.rows}
    assert by[1, ("plan", "looks")].adapter_output is None
    assert by[1, ("plan", "looks")].lr_cache is None
    assert by[1, ("plan", "looks")].full_cache < by[1, ("plan", "looks")].base_cache
    assert by[0, ("plan", "low")].adapter_output is not None
    assert by[1, ("plan", "low")].adapter_output is None
    assert by[2, ("looks", None)].full_cache == by[2, ("looks", None)].base_cache < 1
    means = {row.agents: row for row in report.means()}
    assert means["plan", "low"].adapter_output == by[0, ("plan", "low")].adapter_output
    assert means["plan", "looks"].lr_cache is None


def test_no_adapter_is_on_v_proj_at_all() -> None:
    model = peft_model(adapters={"plan": {}, "act": {}}, target_modules=["q_proj"]).double()
    agents = ["plan", "act"]
    assert_same(as_dict(layer_similarity(model, [TRAJECTORY_OF_PLAN], agents)), by_hand(model, [IDS], agents))


def test_unequal_ranks_have_no_cosine_of_lr() -> None:
    for row in layer_similarity(peft_model(), [TRAJECTORY], ["act", "reflect"]).rows:
        assert row.lr_cache is None
        assert row.adapter_output is not None


def test_an_untrained_adapter_adds_nothing_that_has_a_direction() -> None:
    model = peft_model()
    for module in model.modules():
        if hasattr(module, "lora_B"):
            module.lora_B["act"].weight.data.zero_()
    for row in layer_similarity(model, [TRAJECTORY], ["plan", "act", None]).rows:
        assert row.adapter_output is None
        assert row.agents != ("act", None) or row.full_cache == pytest.approx(1.0)


def test_lora_bias_is_part_of_what_the_adapter_adds() -> None:
    model = peft_model(lora_bias=True, target_modules=["v_proj"]).double()
    rows = layer_similarity(model, [TRAJECTORY], ["plan", "act"]).rows
    x = Alone(model, None, IDS).inputs[0]  # the same for all before the first layer
    v = model.get_base_model().model.layers[0].self_attn.v_proj
    left, right = (v.lora_B[name](v.lora_A[name](x)).detach() for name in ("plan", "act"))
    assert rows[0].adapter_output == pytest.approx(float(F.cosine_similarity(left, right, dim=-1).mean()))


def test_half_precision_with_adapters_in_full() -> None:
    model = peft_model()
    want = as_dict(layer_similarity(model.double(), [TRAJECTORY]))
    got = as_dict(layer_similarity(_half(model), [TRAJECTORY]))
    assert_same(got, want, rel=0.03)


def _half(model: PeftModel) -> PeftModel:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    return model


def test_many_tokens_are_compared_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = peft_model().double()
    want = as_dict(layer_similarity(model, [TRAJECTORY]))
    monkeypatch.setattr(similarity, "_AT_ONCE", 7)
    assert_same(as_dict(layer_similarity(model, [TRAJECTORY])), want)


# --- what it takes ----------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes of tensors made under it that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.bytes = max(self.bytes, sum(size for _, size in self.live.values()))
        return out


def test_it_keeps_nothing_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a forward over the same rows: less than two layers' caches, of 12 layers."""
    wide = {"num_hidden_layers": 12, "num_key_value_heads": 6, "intermediate_size": 16}
    model, agents = peft_model(config(**wide), target_modules=QKV), ["plan", "act", "reflect"]
    trajectory = AgentTrajectory(tokens(200)[0], ())
    with Peak() as compared:
        layer_similarity(model, [trajectory], agents)
    monkeypatch.setattr(similarity._Comparison, "watch", lambda *_: iter(()))
    with Peak() as plain:
        layer_similarity(model, [trajectory], agents)
    cache_of_layer = len(agents) * 200 * 2 * 48 * 4
    assert plain.bytes > cache_of_layer
    assert compared.bytes - plain.bytes < 2 * cache_of_layer


# --- what it leaves behind --------------------------------------------------------------------------------------------


def state(model: PeftModel) -> Any:
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    return (
        hook_census(model),
        [(list(layer.active_adapters), layer.disable_adapters) for layer in layers],
        [parameter.requires_grad for parameter in model.parameters()],
    )


@pytest.mark.parametrize("agent", ["act", None])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("fails", [None, "v_proj", "o_proj"])
def test_the_model_is_left_as_it_was(fails: str | None, attached: bool, agent: str | None) -> None:
    model = peft_model(modules_to_save=["lm_head"])
    cache = LoRASharedCache(model) if attached else DynamicCache()
    want = LoRASharedCache(model) if attached else DynamicCache()
    for each in (cache, want):
        active(model, "plan", lambda each=each: run(model, each, IDS[None, :10]))

    def check() -> None:
        before = state(model)
        if fails is None:
            layer_similarity(model, [TRAJECTORY])
        else:
            module = getattr(model.get_base_model().model.layers[1].self_attn, fails)
            with raising(module, ArithmeticError("broken")), pytest.raises(ArithmeticError):
                layer_similarity(model, [TRAJECTORY])
        assert state(model) == before

    logits = active(model, agent, lambda: run(model, want, IDS[None]))
    active(model, agent, check)
    assert torch.equal(active(model, agent, lambda: run(model, cache, IDS[None])), logits)


@pytest.mark.parametrize("agent", ["act", None])
def test_an_audit_leaves_trainable_copies_as_they_were(agent: str | None) -> None:
    model = peft_model(modules_to_save=["lm_head"], target_modules=["v_proj"])
    LoRASharedCache(model)

    def check() -> None:
        before = state(model)
        audit(model, [TRAJECTORY], schemes=["full_shared"])
        assert state(model) == before

    active(model, agent, check)


# --- adapters and models of other kinds -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_adapters_that_transformers_itself_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers asks for a newer PEFT than it needs for what is called here
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18")
    peft = peft_model(adapters={"plan": {}, "act": {}}).double()
    model = base_model(config()).double()
    for name in ("plan", "act"):
        model.add_adapter(LoraConfig(r=5, lora_alpha=10, target_modules=["q_proj", "v_proj"]), adapter_name=name)
    randomise(model)
    model.double().eval().set_adapter("act")
    agents = ["plan", "act", None]
    want = by_hand(peft, [IDS], agents)
    before = state(model)
    assert_same(as_dict(layer_similarity(model, [TRAJECTORY_OF_PLAN], agents)), want)
    assert state(model) == before
    model.disable_adapters()
    before = state(model)
    assert_same(as_dict(layer_similarity(model, [TRAJECTORY_OF_PLAN], agents)), want)
    assert state(model) == before


def _loha() -> PeftModel:
    model = PeftMixedModel(base_model(config()), LoraConfig(r=5, target_modules=["v_proj"]), adapter_name="plan")
    model.add_adapter("act", LoraConfig(r=5, target_modules=["v_proj"]))
    model.add_adapter("loha", LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False))
    randomise(model)
    model.set_adapter("plan")
    return model.eval()


REFUSED = {
    "dora": (lambda: peft_model(adapters={"plan": {}, "act": {"use_dora": True}}), "'act' is DoRA at .*q_proj"),
    "loha": (_loha, "q_proj has adapters of another kind than LoRA"),
    "copies of one": (
        lambda: peft_model(adapters={"plan": {}, "act": {"modules_to_save": ["lm_head"]}}),
        "lm_head is trained for some adapters and not for 'plan'",
    ),
    "copies of v_proj": (
        lambda: peft_model(adapters={"plan": {}, "act": {}}, target_modules=["q_proj"], modules_to_save=["v_proj"]),
        r"layers.0.self_attn.v_proj: it has trainable copies",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_run_as_rows_of_one_batch_is_said(case: str) -> None:
    make, message = REFUSED[case]
    model = make()
    with pytest.raises(UnsupportedAdapterError, match=message):
        layer_similarity(model, [TWO])
    result = audit(model, [TWO], schemes=["full_shared"])
    assert result.rows[0].tokens == 20
    assert result.layers is None
    assert str(result) == f"{result.table()}\n\nLayers were not compared: {result.layers_refused}"


def test_dora_of_an_adapter_that_is_not_compared_is_no_matter() -> None:
    model = peft_model(adapters={"plan": {}, "act": {}, "other": {"use_dora": True}})
    assert len(layer_similarity(model, [TWO]).rows) == 3


def test_copies_of_whole_modules_are_said_by_peft() -> None:
    model = peft_model(adapters={"plan": {}, "act": {}}, target_modules=["q_proj"], modules_to_save=["mlp"])
    before = state(model)
    result = audit(model, [TWO], schemes=["full_shared"])
    assert "Mixed batching is only supported" in result.layers_refused
    detach(model)
    assert state(model) == before


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["lm_head", "embed_tokens"]}, {"trainable_token_indices": IDS[:2].tolist()}]
)
def test_copies_that_peft_runs_row_by_row(options: dict[str, Any]) -> None:
    model = peft_model(adapters={"plan": {}, "act": {}}, **options).double()
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name or "trainable_tokens_delta" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    agents = ["plan", "act"]
    want = by_hand(model, [IDS], agents)
    assert want[0, ("plan", "act"), "base_cache"] < 1 - 1e-6
    assert_same(as_dict(layer_similarity(model, [TWO])), want)


def test_a_model_without_a_v_proj_is_said() -> None:
    gpt = base_model(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=97, n_positions=128))
    model = PeftModel(gpt, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True), adapter_name="plan").eval()
    with pytest.raises(UnsupportedModelError, match="fused qkv"):
        layer_similarity(model, [TRAJECTORY_OF_PLAN], ["plan", None])


@pytest.mark.parametrize(
    ("agents", "turns", "message"),
    [
        (["plan"], TURNS, r"only \['plan'\]"),
        (None, [("plan", 9), ("plan", 40)], r"only \['plan'\]"),
        (["plan", "critic"], TURNS, "'critic' is no adapter"),
        (None, [("plan", 9), ("critic", 40)], "'critic' is no adapter"),
        (None, [("plan", 9), ("act", 9)], "growing stops"),
    ],
)
def test_agents_and_turns_that_make_no_sense(agents: Any, turns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_similarity(peft_model(), [AgentTrajectory(IDS, turns)], agents)


def test_no_tokens_training_mode_and_merged_adapters_are_said() -> None:
    model = peft_model()
    with pytest.raises(ValueError, match="no tokens"):
        layer_similarity(model, [AgentTrajectory(IDS[:0], ())], ["plan", "act"])
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        layer_similarity(peft_model().train(), [TRAJECTORY])
    model.merge_adapter(["plan"])
    with pytest.raises(ValueError, match="unmerge_adapter"):
        layer_similarity(model, [TRAJECTORY])


# --- in an audit, on paper --------------------------------------------------------------------------------------------


def test_an_audit_has_the_layers_of_the_agents_that_take_turns() -> None:
    model = peft_model()
    result = audit(model, iter([TRAJECTORY]), schemes=["full_shared"])
    assert result.layers_refused is None
    assert result.layers == layer_similarity(model, [TRAJECTORY], ALL)
    assert str(result) == f"{result.table()}\n\n{result.layers}"
    without = audit(model, [TRAJECTORY], schemes=["full_shared"], layers=False)
    assert (without.layers, without.layers_refused) == (None, None)
    assert str(without) == without.table() == result.table()


ROWS = (
    SimilarityRow(0, ("plan", "act"), 1.0, 0.75, 0.25, None, 0.5),
    SimilarityRow(0, ("plan", None), 1.0, 0.5, None, None, 0.25),
    SimilarityRow(2, ("plan", "act"), 0.5, 0.25, None, None, 0.5),
    SimilarityRow(2, ("plan", None), 0.5, 0.5, None, None, 0.75),
)


def test_its_tables() -> None:
    report = SimilarityReport(ROWS, 1234)
    assert report.table().splitlines() == [
        "| agents | base cache | full cache | adapter output | LR cache | keys |",
        "|---|---|---|---|---|---|",
        "| plan / act | 0.7500 | 0.5000 | 0.2500 | - | 0.5000 |",
        "| plan / base model | 0.7500 | 0.5000 | - | - | 0.5000 |",
    ]
    per_layer = report.table(per_layer=True).splitlines()
    assert per_layer[0].startswith("| layer | agents | base cache |")
    assert per_layer[1] == "|---|---|---|---|---|---|---|"
    assert per_layer[4] == "| 2 | plan / act | 0.5000 | 0.2500 | - | - | 0.5000 |"
    assert str(report) == f"Cosine between agents, mean over 1,234 tokens and 2 layers:\n\n{report.table()}"


def test_it_draws_the_mean_and_the_range_of_pairs(tmp_path: Path) -> None:
    figure = SimilarityReport(ROWS, 9).plot(tmp_path / "layers.png")
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}
    assert lines == {
        "base cache": ([0, 2], [1.0, 0.5]),
        "full cache": ([0, 2], [0.625, 0.375]),
        "adapter output": ([0], [0.25]),
        "keys": ([0, 2], [0.375, 0.625]),
    }
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
