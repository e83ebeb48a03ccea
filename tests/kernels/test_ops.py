"""The kernels as a torch operator: its fake, torch.compile, what is refused, and how a backend is chosen."""

import functools
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases import Case

from lragent_hf import attention
from lragent_hf.attention import flash_lora_attention
from lragent_hf.attention.reference import reference_attention
from lragent_hf.errors import BackendUnavailableError
from lragent_hf.kernels import flash_lora_attention as kernel_attention
from lragent_hf.kernels import launch, unsupported

op = torch.ops.lragent_hf.flash_lora_attention.default


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "case", [Case(D=32), Case(D=32, rank=None, padding="left", window=4), Case(key_rank=3)], ids=str
)
def test_opcheck(case, return_lse):
    options = case.options()
    tensors = [*case.tensors(), *(options.get(name) for name in ("k_lr", "b_k", "cos", "sin", "key_padding_mask"))]
    arguments = (*tensors, 0.2, True, case.window, None, False, return_lse)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize(
    "attend", [kernel_attention, functools.partial(flash_lora_attention, backend="triton"), flash_lora_attention]
)
def test_compiles_whole_and_once_for_all_lengths(attend):
    """No graph break (fullgraph), and one graph for decode at any length of the cache."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=keep)
    def layer(q, k, v_base, v_lr, b):
        return attend(q * 2, k, v_base, v_lr, b, softcap=20.0) + 1

    torch._dynamo.reset()
    with torch.no_grad():
        for past in (7, 33, 50):
            tensors = Case(batch=1, Lq=2, past=past, D=32).tensors()
            got = layer(*tensors)
            want = reference_attention(tensors[0] * 2, *tensors[1:], softcap=20.0) + 1
            torch.testing.assert_close(got, want)
    assert len(graphs) == 1


def test_fake_results_look_like_real_ones():
    for Lq in (1, 5):
        tensors = Case(Lq=Lq, D=32).tensors()
        out, lse = kernel_attention(*tensors, return_lse=True)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
            fake_out, fake_lse = kernel_attention(*map(fake.from_tensor, tensors), return_lse=True)
        for real, like in ((out, fake_out), (lse, fake_lse)):
            assert real.shape == like.shape
            assert real.stride() == like.stride()
            assert real.dtype == like.dtype
        assert out.transpose(1, 2).is_contiguous()


def test_gradients_are_refused():
    tensors = [t.requires_grad_() for t in Case(D=32).tensors()]
    with pytest.raises(NotImplementedError, match="backend='reference'"):
        kernel_attention(*tensors)
    with pytest.raises(BackendUnavailableError, match="no backward"):
        flash_lora_attention(*tensors, backend="triton")
    with torch.no_grad():
        torch.testing.assert_close(flash_lora_attention(*tensors, backend="triton"), reference_attention(*tensors))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(dtype=torch.float64), "not torch.float64"),
        (Case(D=264, past=0), "head_dim up to 256"),
        (Case(rank=129), "v_lr has 129"),
        (Case(key_rank=129), "k_lr has 129"),
        (Case(dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(case, reason):
    with pytest.raises(BackendUnavailableError, match=reason):
        flash_lora_attention(*case.tensors(), **case.options(), backend="triton")


@pytest.fixture
def fresh_choice(monkeypatch):
    monkeypatch.setattr(attention, "_said", set())
    monkeypatch.setattr(attention, "_chosen", {})


def test_auto_takes_what_serves_the_call_and_says_so_once(fresh_choice, caplog, monkeypatch):
    monkeypatch.setattr(attention, "_automatic", lambda device: "triton")  # as on a GPU
    served, refused = Case(D=32).tensors(), Case(D=264, past=0).tensors()
    with caplog.at_level(logging.INFO, logger="lragent_hf"):
        with mock.patch.object(launch, "attend", wraps=launch.attend) as launched:
            flash_lora_attention(*served)
            assert launched.call_count == 1
            for _ in range(3):
                flash_lora_attention(*refused)
            flash_lora_attention(*(t.detach().requires_grad_() for t in served)).sum().backward()
            assert launched.call_count == 1
    said = [r.getMessage() for r in caplog.records if "backend blockwise" in r.getMessage()]
    assert len(said) == 2
    assert "head_dim" in said[0]
    assert "no backward" in said[1]


def test_auto_on_a_gpu_is_triton(fresh_choice, caplog):
    with caplog.at_level(logging.INFO, logger="lragent_hf"):
        assert attention._automatic("cuda") == "triton"
        assert attention._automatic("cpu") == "blockwise"
    assert "backend triton" in caplog.text


def test_on_cpu_the_kernels_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert "not on cpu" in unsupported(*Case().tensors())


def test_importing_the_library_does_not_import_triton():
    program = (
        "import sys, torch, lragent_hf, lragent_hf.attention as a; assert 'lragent_hf.kernels' not in sys.modules;"
    )
    program += "sys.modules['triton'] = None; q = torch.zeros(1, 1, 1, 8); a.flash_lora_attention(q, q, q);"
    program += "\ntry: a.flash_lora_attention(q, q, q, backend='triton')"
    program += "\nexcept Exception as error: assert type(error).__name__ == 'BackendUnavailableError', error"
    program += "\nelse: raise SystemExit('no error')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.slow
def test_the_gpu_check_runs_to_its_end(tmp_path):
    """On a CPU, interpreted and tiny: every line of the script but the ones that need a GPU."""
    script = Path(__file__).parents[2] / "examples" / "gpu_check.py"
    command = [sys.executable, str(script), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 failed" in done.stdout
    assert len((tmp_path / "dry_run.csv").read_text().splitlines()) > 20
