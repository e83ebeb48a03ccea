"""Static mode (``max_cache_len``): the same results on fixed shapes, and one compilation for all agents and turns."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import NaiveRun, assert_close_to_oracle, assert_turns, exact_twin
from peft import LoraConfig, PeftModel
from tiny import (
    AGENTS,
    CACHE_ARG,
    SCHEMES,
    WITH_WINDOW,
    assert_same_state,
    base_model,
    config,
    decoder_of,
    hook_census,
    peft_model,
    randomise,
    run,
    snapshot,
    tokens,
    turn,
    write,
)
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from transformers import CompileConfig, Gemma2Config, Phi3Config

from lragent_hf import LoRASharedCache, detach
from lragent_hf.bench import compiled as compiled_bench
from lragent_hf.bench.verify import same_logits
from lragent_hf.errors import CacheFullError, LRAgentError
from lragent_hf.static import StaticMode

LENGTH = 160
TURNS = ("plan", "act", "plan", "reflect", "act", "plan", "reflect", "act", "plan", "plan", "act", "reflect")
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def static_tokens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who ran each token that was taken on fixed shapes."""
    seen: list[str] = []
    enter = StaticMode.enter

    def spy(self: StaticMode, forward: Any, *rest: Any) -> Any:
        seen.append("+".join(forward.plan.agent) or "base")
        return enter(self, forward, *rest)

    monkeypatch.setattr(StaticMode, "enter", spy)
    return seen


def talk(model: Any, cache: LoRASharedCache, ids: Tensor, pads: int = 0, turns: Any = TURNS, **options: Any) -> Tensor:
    """Agents take turns: each reads two to four tokens more and writes five with ``generate``; the trajectory.

    The first ``pads`` tokens of the first row are padding.
    """
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    for number, agent in enumerate(turns):
        ids = torch.cat([ids, tokens(2 + number % 3, ids.shape[0], seed=100 + number)], 1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        model.set_adapter(agent)
        ids = write(model, ids, 5, cache, attention_mask=mask, **options)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return ids


def compiled(backend: str | Callable[..., Any]) -> dict[str, Any]:
    """Options that let ``generate`` compile decoding on a CPU, too."""
    how = CompileConfig(backend=backend, mode=None)  # type: ignore[arg-type]
    how._compile_all_devices = True  # type: ignore[assignment]
    return {"compile_config": how}


class Graphs(list[int]):
    """A backend of torch.compile that keeps count: a graph an item, its number of projections."""

    def __init__(self) -> None:
        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            self.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
            return lookup_backend("aot_eager")(graph, inputs)  # refuses what inductor would, in a tenth of the time

        self.backend = backend  # no method: `generate` copies what it is given, but for functions


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    """None so far."""
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("scheme", "window"), [*((scheme, 0) for scheme in SCHEMES), *((scheme, 6) for scheme in WITH_WINDOW)]
)
def test_every_scheme_equals_its_plain_definition(scheme: str, window: int, static_tokens: list[str]) -> None:
    model = peft_model(shared=scheme == "base_lr_shared", target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])
    model = exact_twin(model)
    ids, mask = tokens(60, 2), torch.ones(2, 60, dtype=torch.long)
    mask[0, :4] = 0
    turns = [(("plan",), 12), (("act",), 20), (("plan",), 24), ((), 30), (("act", "reflect"), 38), (("act",), 44)]
    cache = LoRASharedCache(model, scheme, handover_window=window, max_cache_len=60)
    assert_turns(model, cache, NaiveRun(exact_twin(model), scheme, window), ids, [*turns, (("plan",), 60)], mask)
    assert len(static_tokens) > 8


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("sliding", "sdpa"), ("sliding", "eager"), ("hybrid", "eager"), ("qk norm", "sdpa"), ("fused qkv", "sdpa")],
)
def test_other_architectures_equal_themselves_without(kind: str, attention: str, static_tokens: list[str]) -> None:
    """Sliding windows that the trajectory leaves, soft-capped scores, padding, masks made by ``generate`` or by us."""
    small = config().to_dict()
    sizes = {key: small[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                         "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
                                         "pad_token_id", "initializer_range")}  # fmt: skip
    cfg = {
        "sliding": lambda: config("mistral", sliding_window=9),
        "hybrid": lambda: Gemma2Config(**sizes, head_dim=8, sliding_window=7, eos_token_id=None, bos_token_id=None),
        "qk norm": lambda: config("qwen3"),
        "fused qkv": lambda: Phi3Config(**sizes, eos_token_id=None, bos_token_id=None, sliding_window=None),
    }[kind]()
    cfg._attn_implementation = attention
    modules = ["qkv_proj"] if kind == "fused qkv" else ["q_proj", "v_proj"]
    model = peft_model(cfg, target_modules=modules).double()
    scheme = "full_shared" if kind == "fused qkv" else "base_lr_stacked"
    ids = tokens(11, 2)
    for by_hand in (False, True):
        caches = [LoRASharedCache(model, scheme, **how) for how in ({}, {"max_cache_len": LENGTH})]
        got = []
        for cache in caches:
            if not by_hand:
                got.append(talk(model, cache, ids, pads=3))
                continue
            more = torch.cat([ids, tokens(20, 2, seed=5)], 1)
            mask = torch.ones_like(more)
            mask[1, :2] = 0
            got.append(
                torch.cat([turn(model, cache, agent, more[:, :stop], mask[:, :stop])[:, -1] for agent, stop in (
                    ("plan", 11), ("plan", 12), ("plan", 13), ("act", 20), ("act", 21), ("plan", 30), ("plan", 31)
                )])
            )  # fmt: skip
        assert torch.equal(*got) if not by_hand else (got[0] - got[1]).abs().max() < 1e-9
    assert bool(static_tokens) == (kind != "fused qkv")


@pytest.mark.parametrize(
    "scheme", [s if s == "base_lr_stacked" else pytest.param(s, marks=pytest.mark.slow) for s in SCHEMES]
)
def test_one_compilation_serves_all_agents_and_turns(
    scheme: str, graphs: Graphs, static_tokens: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shared = scheme == "base_lr_shared"
    model = peft_model(shared=shared, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    if scheme == "base_shared":  # keeps an LR of each agent's own rank: another rank is another shape
        model = peft_model(adapters={name: {} for name in AGENTS})
    want = talk(model, LoRASharedCache(model, scheme), tokens(7, 2), pads=2)
    cache = LoRASharedCache(model, scheme, max_cache_len=LENGTH)
    assert cache.is_compileable
    assert torch.equal(talk(model, cache, tokens(7, 2), pads=2, **compiled(graphs.backend)), want)
    assert set(static_tokens) == set(AGENTS)
    assert len(static_tokens) == 4 * len(TURNS)  # the first of five comes out of the prefill
    again = LoRASharedCache(model, scheme, max_cache_len=LENGTH)
    assert torch.equal(talk(model, again, tokens(7, 2), pads=2, **compiled(graphs.backend)), want)
    with capsys.disabled():
        print(
            f"\n{scheme}: graphs compiled (products in each) {list(graphs)}: 3 agents, {2 * len(TURNS)} turns, 2 caches"
        )
    decode = [count for count in graphs if count > 1]
    assert len(decode) == 1  # prefills are not compiled
    assert len(graphs) <= 2  # the rest is the language model's head


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_stacked"])
def test_inductor_writes_the_same(scheme: str) -> None:
    torch._dynamo.reset()
    model = peft_model(config(num_hidden_layers=2), target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])
    want = talk(model, LoRASharedCache(model, scheme), tokens(7, 2), pads=2)
    cache = LoRASharedCache(model, scheme, max_cache_len=LENGTH)
    assert torch.equal(talk(model, cache, tokens(7, 2), pads=2, **compiled("inductor")), want)
    torch._dynamo.reset()


def test_what_is_too_long_is_refused_before_anything_is_written(static_tokens: list[str]) -> None:
    model = peft_model()
    cache = LoRASharedCache(model, max_cache_len=20)
    ids = tokens(25)
    turn(model, cache, "plan", ids[:, :15])
    before = snapshot(cache)
    for agent, stop in (("plan", 21), ("act", 25)):
        with pytest.raises(CacheFullError, match=r"max_cache_len=20.*larger max_cache_len"):
            turn(model, cache, agent, ids[:, :stop])
        assert_same_state(snapshot(cache), before)
    for stop in range(16, 21):
        turn(model, cache, "plan", ids[:, :stop])
    with pytest.raises(CacheFullError):
        turn(model, cache, "plan", ids[:, :21])
    assert cache.get_seq_length() == 20
    assert len(static_tokens) == 5
    for value in (0, -3):
        with pytest.raises(ValueError, match="max_cache_len counts positions"):
            LoRASharedCache(model, max_cache_len=value)


@pytest.mark.parametrize("scheme", ["base_shared", "base_lr_stacked", "full_shared"])
def test_catching_up_a_token_at_a_time_rewrites_nothing(scheme: str, static_tokens: list[str]) -> None:
    """An agent that joins late, or a hand-over window, in forwards of one token: not what only appends."""
    model = peft_model().double()
    window = {} if scheme == "base_shared" else {"handover_window": 5}
    caches = [LoRASharedCache(model, scheme, agents=["plan"], **window, **how) for how in ({}, {"max_cache_len": 30})]
    ids = tokens(20)
    for agent, stops in (("plan", [9, 10]), ("act", range(1, 13)), ("plan", range(1, 15)), ("act", range(1, 16))):
        for stop in stops:
            model.set_adapter(agent)
            if stop > caches[0].get_seq_length():
                left, right = (turn(model, cache, agent, ids[:, :stop]) for cache in caches)
                assert (left - right).abs().max() < 1e-9, (agent, stop)
    assert len(static_tokens) >= 4


def test_buffers_keep_their_place() -> None:
    """What compiled code knows stays where it is: over turns, crops and reordered rows."""
    model = peft_model()
    cache = LoRASharedCache(model, max_cache_len=64)
    ids = tokens(50, 2)

    def places() -> list[int]:
        return [
            buffer.data.data_ptr() for layer in cache.layers for buffer in layer.buffers() if buffer.data is not None
        ]

    turn(model, cache, "plan", ids[:, :9])
    first = places()
    assert all(buffer.capacity == 64 for layer in cache.layers for buffer in layer.buffers())
    for agent, stop in (("plan", 10), ("act", 15), ("act", 16), ("plan", 30)):
        turn(model, cache, agent, ids[:, :stop])
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([1, 0]))
    turn(model, cache, "plan", ids[[1, 0], :40])
    assert places() == first


def test_beams_reorder_fixed_buffers(static_tokens: list[str]) -> None:
    model = peft_model()
    ids, found = tokens(9), []
    for how in ({}, {"max_cache_len": 40}):
        cache = LoRASharedCache(model, **how)
        model.set_adapter("plan")
        write(model, ids, 3, cache)
        model.set_adapter("act")
        found.append(write(model, ids, 12, LoRASharedCache(model, **how), num_beams=3))
    assert torch.equal(*found)
    assert "act" in static_tokens


def test_an_edited_adapter_counts_from_the_next_token(static_tokens: list[str]) -> None:
    model = peft_model(target_modules=["q_proj", "v_proj", "o_proj"]).double()
    cache, plain = LoRASharedCache(model, max_cache_len=40), LoRASharedCache(model)
    ids = tokens(30)
    layer = decoder_of(model).layers[1].self_attn

    def edit_b() -> None:
        layer.v_proj.lora_B["plan"].weight.data.mul_(1.5)

    def edit_a() -> None:
        with torch.no_grad():
            layer.o_proj.lora_A["plan"].weight.mul_(-1.0)

    def edit_scale() -> None:
        layer.q_proj.scaling["plan"] *= 2

    def replace() -> None:
        layer.o_proj.lora_B["plan"].weight = torch.nn.Parameter(layer.o_proj.lora_B["plan"].weight.flip(0))

    last = turn(model, cache, "plan", ids[:, :10])
    assert torch.equal(turn(model, plain, "plan", ids[:, :10]), last)
    for number, edit in enumerate((edit_b, edit_a, edit_scale, replace)):
        left = copy.deepcopy(cache)
        want_without = turn(model, left, "plan", ids[:, : 11 + number])
        edit()
        got, want = (turn(model, one, "plan", ids[:, : 11 + number]) for one in (cache, plain))
        assert (got - want).abs().max() < 1e-9
        assert (got - want_without).abs().max() > 1e-6
    assert len(static_tokens) == 8


def test_adapters_that_come_between_turns_get_slots(static_tokens: list[str]) -> None:
    """On layers that had none, and in place of one of the same name."""
    model = peft_model().double()
    cache, plain = LoRASharedCache(model, max_cache_len=60), LoRASharedCache(model)
    ids, stop = tokens(60), 9

    def both(agent: str) -> None:
        nonlocal stop
        for count in (4, 1, 1):
            stop += count
            left, right = (turn(model, one, agent, ids[:, :stop]) for one in (cache, plain))
            assert (left - right).abs().max() < 1e-9

    both("plan")
    for modules in (["q_proj", "v_proj", "o_proj"], ["v_proj", "up_proj"]):
        model.add_adapter("new", LoraConfig(r=6, target_modules=modules))
        randomise(model, only="new", seed=len(modules))
        model.double().eval()
        both("new")
        both("plan")
        model.delete_adapter("new")
        for one in (cache, plain):
            one.reset()
        both("act")
    assert len(static_tokens) == 14


def test_merged_adapters_are_not_added_twice(static_tokens: list[str]) -> None:
    model = peft_model(target_modules=["q_proj", "o_proj"]).double()
    cache, plain = LoRASharedCache(model, max_cache_len=40), LoRASharedCache(model)
    ids = tokens(14)
    for stop in (10, 11):
        turn(model, cache, "plan", ids[:, :stop])
        turn(model, plain, "plan", ids[:, :stop])
    model.merge_adapter()
    assert (run(model, cache, ids[:, :12]) - run(model, plain, ids[:, :12])).abs().max() < 1e-9
    model.unmerge_adapter()
    assert (run(model, cache, ids[:, :13]) - run(model, plain, ids[:, :13])).abs().max() < 1e-9
    assert static_tokens == ["plan", "plan"]


def test_half_precision_with_adapters_in_float32(static_tokens: list[str]) -> None:
    """As PEFT loads them: their part is added in float32."""
    model = peft_model(target_modules=["q_proj", "v_proj", "o_proj", "up_proj"]).bfloat16()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    ids, found, exact = tokens(16), [], exact_twin(model)
    for how in ({}, {"max_cache_len": 24}):
        cache = LoRASharedCache(model, "full_shared", **how)
        turn(model, cache, "plan", ids[:, :10])
        found.append(torch.cat([turn(model, cache, "plan", ids[:, :stop]) for stop in range(11, 17)], 1))
    got, want = found[1], found[0]
    cache = LoRASharedCache(exact, "full_shared")
    turn(exact, cache, "plan", ids[:, :10])
    oracle = torch.cat([turn(exact, cache, "plan", ids[:, :stop]) for stop in range(11, 17)], 1)
    assert_close_to_oracle("static", got, oracle, want)
    assert len(static_tokens) == 6


def test_copies_forks_and_reloads(tmp_path: Any, static_tokens: list[str]) -> None:
    model = peft_model().double()
    cache, plain = LoRASharedCache(model, max_cache_len=40), LoRASharedCache(model)
    ids = tokens(30)
    for one in (cache, plain):
        turn(model, one, "plan", ids[:, :12])
        turn(model, one, "act", ids[:, :15])
    cache.save(tmp_path / "saved")
    with pytest.raises(CacheFullError, match="max_cache_len=14"):
        LoRASharedCache.load(model, tmp_path / "saved", max_cache_len=14)
    twin, fork, loaded = (
        copy.deepcopy(cache), cache.fork(), LoRASharedCache.load(model, tmp_path / "saved", max_cache_len=30)
    )  # fmt: skip
    assert twin.is_compileable
    assert loaded.is_compileable
    assert not fork.is_compileable  # it grows from what it shares
    for stop in (16, 17, 18):
        want = turn(model, plain, "act", ids[:, :stop])
        for one in (cache, twin, fork, loaded):
            assert (turn(model, one, "act", ids[:, :stop]) - want).abs().max() < 1e-9
    assert len(static_tokens) == 9
    cache.reset()
    assert cache.memory_report().reserved_bytes == 0


def test_what_cannot_run_on_fixed_shapes_runs_as_without(static_tokens: list[str], caplog: Any) -> None:
    """And ``generate`` is told not to compile it."""
    ids = tokens(24)
    cases = {
        "what adapters add to keys": (peft_model(target_modules=["k_proj", "v_proj"]), {}),
        "more than X A B": (peft_model(use_dora=True), {}),
        "rewrites layers": (peft_model(), {"scheme": "droidspeak", "recompute_layers": [1]}),
        "own attention function": (peft_model(), {"attention": "keep"}),
        "offloaded": (peft_model(), {"offload": True}),
    }
    for why, (model, options) in cases.items():
        cache, plain = LoRASharedCache(model, max_cache_len=40, **options), LoRASharedCache(model, **options)
        assert not cache.is_compileable, why
        with caplog.at_level("INFO", "lragent_hf"):
            for agent, stop in (("plan", 10), ("plan", 11), ("act", 17), ("act", 18), ("plan", 24)):
                assert torch.equal(
                    turn(model, cache, agent, ids[:, :stop]), turn(model, plain, agent, ids[:, :stop])
                ), why
        assert why in caplog.text
    assert static_tokens == []
    keys = LoRASharedCache(cases["what adapters add to keys"][0], key_lr=False, max_cache_len=40)
    assert keys.is_compileable


def test_all_linear_layers_with_keys_shared_whole(graphs: Graphs, static_tokens: list[str]) -> None:
    """Adapters of three ranks on every projection, one that lacks some, two at once, and none."""
    adapters = {
        "plan": {"r": 4, "target_modules": ALL_LINEAR},
        "act": {"r": 6, "target_modules": ALL_LINEAR},
        "reflect": {"r": 2, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    }
    model = peft_model(adapters=adapters).double()
    caches = [LoRASharedCache(model, key_lr=False, **how) for how in ({}, {"max_cache_len": 60})]
    ids, fast = tokens(60), torch.compile(model, backend=graphs.backend)
    agents: list[Any] = ["plan", "reflect", "act", None, ["plan", "act"], "plan", ["reflect", "plan"]]
    for number, agent in enumerate(agents):
        for stop in (8 * number + 6, 8 * number + 7, 8 * number + 8):
            found = []
            for one, cache in zip((model, fast), caches, strict=True):
                if agent is None:
                    model.base_model.disable_adapter_layers()
                else:
                    model.base_model.enable_adapter_layers()
                    model.base_model.set_adapter(agent)
                found.append(run(one if stop % 8 != 6 else model, cache, ids[:, :stop]))
            assert (found[0] - found[1]).abs().max() < 1e-9, (agent, stop)
    assert len(static_tokens) == 14
    # Two adapters at once are wider than the widest alone: that once, slots are made anew.
    assert len([count for count in graphs if count > 3]) <= 2


def test_nothing_is_left_on_the_model() -> None:
    model = peft_model()
    census = hook_census(model)
    cache = LoRASharedCache(model, max_cache_len=40)
    ids = tokens(20)
    turn(model, cache, "plan", ids[:, :9])
    turn(model, cache, "plan", ids[:, :10])
    layer = decoder_of(model).layers[1]

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    handle = layer.mlp.register_forward_pre_hook(fail)
    before = snapshot(cache)
    for stop in (11, 15):
        with pytest.raises(RuntimeError, match="in the middle"):
            turn(model, cache, "plan", ids[:, :stop])
        assert_same_state(snapshot(cache), before)
        assert not any("forward" in vars(module) for module in model.modules())
    handle.remove()
    turn(model, cache, "plan", ids[:, :11])
    ref = weakref.ref(cache.layers[0].k[None].data)
    detach(model)
    assert hook_census(model) == census
    del cache
    gc.collect()
    assert ref() is None


def test_a_forward_that_others_put_on_a_layer_stays(static_tokens: list[str]) -> None:
    """Accelerate's hooks do so: such a layer has no slot, and keeps what it has."""
    model = peft_model().double()
    cache, plain = LoRASharedCache(model, max_cache_len=40), LoRASharedCache(model)
    ids = tokens(20)
    for stop in (9, 10):
        turn(model, cache, "plan", ids[:, :stop])
        turn(model, plain, "plan", ids[:, :stop])
    layer = decoder_of(model).layers[1].self_attn.q_proj
    theirs = layer.forward
    layer.forward = theirs
    for agent, stop in (("act", 14), ("act", 15), ("plan", 19), ("plan", 20)):
        left, right = (turn(model, one, agent, ids[:, :stop]) for one in (cache, plain))
        assert (left - right).abs().max() < 1e-9
        assert vars(layer)["forward"] is theirs
    assert static_tokens == ["plan"]


def test_gradients_keep_away_from_fixed_buffers(static_tokens: list[str]) -> None:
    model = peft_model()
    cache = LoRASharedCache(model, max_cache_len=40)
    ids = tokens(12)
    turn(model, cache, "plan", ids[:, :9])
    logits = model(input_ids=ids[:, 9:10], **{CACHE_ARG: cache}).logits  # gradients are on
    with pytest.raises(RuntimeError, match="backward"):
        logits.sum().backward()
    assert static_tokens == []
    assert not any(buffer.data.requires_grad for layer in cache.layers for buffer in layer.buffers())
    turn(model, cache, "plan", ids[:, :11])
    assert static_tokens == ["plan"]


def test_attentions_autocast_and_dropout(static_tokens: list[str]) -> None:
    """What fixed shapes do not take on the way: as without them."""
    ids = tokens(20)

    def differ(model: PeftModel, cut: int, **how: Any) -> float:
        caches = [LoRASharedCache(model, **options) for options in ({}, {"max_cache_len": 30})]
        worst = 0.0
        for stop in range(cut, cut + 4):
            found = []
            for cache in caches:
                torch.manual_seed(0)
                found.append(run(model, cache, ids[:, :stop], **how))
            worst = max(worst, float((found[0] - found[1]).abs().max()))
        return worst

    cfg = config()
    cfg._attn_implementation = "eager"
    assert differ(peft_model(cfg).double(), 9, output_attentions=True) < 1e-9
    assert static_tokens == []
    with torch.autocast("cpu", torch.bfloat16):
        assert differ(peft_model(target_modules=["q_proj", "v_proj", "up_proj"]), 9) == 0.0
    model = peft_model(target_modules=["q_proj", "o_proj"], lora_dropout=0.5)
    decoder_of(model).layers[1].self_attn.o_proj.train()
    assert differ(model, 9) == 0.0
    assert static_tokens == []


def test_rows_with_adapters_of_their_own(static_tokens: list[str]) -> None:
    model = peft_model()
    ids, names = tokens(9, 2), ["plan", "act"]
    found = [
        write(model, ids, 6, LoRASharedCache(model, **how), adapter_names=names, **compiled("eager"))
        for how in ({}, {"max_cache_len": 40})
    ]
    assert torch.equal(*found)
    assert static_tokens == []


def test_a_plain_model_without_adapters(static_tokens: list[str]) -> None:
    model = base_model(config())
    caches = [LoRASharedCache(model, "full_shared", **how) for how in ({}, {"max_cache_len": 30})]
    ids = tokens(12)
    for stop in (9, 10, 11):
        assert isinstance(model, torch.nn.Module)
        assert not isinstance(model, PeftModel)
        left, right = (run(model, cache, ids[:, :stop]) for cache in caches)
        assert (left - right).abs().max() < 1e-5
    assert len(static_tokens) == 2


def test_obstacles_are_library_errors() -> None:
    assert issubclass(CacheFullError, LRAgentError)
    assert issubclass(CacheFullError, ValueError)


def test_the_benchmark_verifies_before_it_times(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_bench, "CompileConfig", lambda: compiled(graphs.backend)["compile_config"])
    options = {
        "context": 20, "turns": 4, "new": 3, "scheme": "base_lr_stacked", "model": "tiny", "modules": ["q_proj", "v_proj"],
        "rank": 4, "dtype": None, "repeats": 1, "device": "cpu", "threads": None,
    }  # fmt: skip
    found = compiled_bench.run(**options)
    assert found["graphs"] == 2
    assert found["recompiled"] == 0
    talk = compiled_bench._talk
    monkeypatch.setattr(
        compiled_bench, "_talk",
        lambda model, cache, *rest, **more: (
            lambda logits, *other: (logits + (1e-2 if cache.static else 0), *other)
        )(*talk(model, cache, *rest, **more)),
    )  # fmt: skip
    with pytest.raises(SystemExit, match="fixed: logits are not those"):
        compiled_bench.run(**options)
    with pytest.raises(SystemExit, match="nan"):
        same_logits("not a number", torch.tensor([1.0, float("nan")]), torch.ones(2))
