"""Other packages' kernels as backends, with packages of the same names and signatures that compute by our reference."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from longrecall import ops
from longrecall.cli.main import main
from longrecall.layers.mixers.registry import mixer_config
from longrecall.ops import gated_delta_rule, hopper_kernels, peers, reference
from longrecall.ops.backends import OPS
from longrecall.ops.delta_rule.subheads import subhead_delta_rule
from longrecall.ops.shapes import repeat_heads

ROWS, LENGTH, HEADS, WIDTH = 2, 20, 4, 64
VERSIONS = {"fla-core": "0.6.0", "flash-qla": "0.1.3", "triton": "3.7.1", "tilelang": "0.1.15"}


def fake(name: str, calls: list[str], rule: Callable[..., Any], *, shares: bool, decay: str, own: str) -> Callable:
    """A function that demands what the real one demands and computes by the reference; `own`: "fla" or "flash_qla"."""

    def check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor) -> None:
        assert q.dtype == k.dtype == v.dtype in peers.DTYPES and q.shape == k.shape
        assert q.shape[2] == v.shape[2] or shares
        assert state.dtype == torch.float32 and state.shape == (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
        shape = (*v.shape[:3], q.shape[3]) if decay == "channel" else v.shape[:3]
        assert g is None or (g.dtype == torch.float32 and g.shape == shape and bool(g.isfinite().all()))
        assert g is not None or own == "fla"

    def compute(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float, state: Tensor):
        calls.append(f"{own}.{name}")
        check(q, k, v, g, state)
        gates = {} if beta is None else {"beta": beta}
        q, k = (repeat_heads(x, v.shape[2]).float() for x in (q, k))
        out, final = rule(q=q, k=k, v=v.float(), log_decay=g, **gates, scale=scale, state=state)
        return out.to(v.dtype), final

    if name == "chunk_delta_rule":

        def delta(q, k, v, beta, scale=None, initial_state=None, output_final_state=False):
            assert output_final_state and beta.shape == v.shape[:3]
            return compute(q, k, v, None, beta, scale, initial_state)

        return delta
    if rule is reference.gated_delta_rule:

        def gated(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
            assert output_final_state and beta.shape == v.shape[:3] and beta.dtype == torch.float32
            return compute(q, k, v, g, beta, scale, initial_state)

        return gated

    def linear(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
        assert output_final_state
        return compute(q, k, v, g, None, scale, initial_state)

    return linear


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Both packages "installed" on a machine with a Hopper GPU, tensors of the CPU taken for its own; their calls."""
    calls: list[str] = []
    for name, peer in peers.PEERS.items():
        for (op, decay), (module, function) in peer.functions.items():
            rule, shares = getattr(reference, op), function in peer.shares_keys
            made = fake(function, calls, rule, shares=shares, decay=decay, own=name)
            where = sys.modules.get(module)
            if where is None or not isinstance(where, Fake):
                where = Fake(module)
                monkeypatch.setitem(sys.modules, module, where)
            setattr(where, function, made)
    monkeypatch.setattr(peers, "_version", VERSIONS.get)
    monkeypatch.setattr(peers, "_has_nvcc", lambda: True)
    monkeypatch.setattr(peers, "_on_gpu", lambda x: True)
    monkeypatch.setattr(peers, "_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.delenv("LONGRECALL_BACKEND", raising=False)
    monkeypatch.delenv("FLA_TILELANG", raising=False)
    peers._loaded.cache_clear()
    yield calls
    peers._loaded.cache_clear()


class Fake(types.ModuleType):
    """A module of this test."""


def inputs(
    decay: str, groups: int = HEADS, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor | None]:
    """Inputs of the gated delta rule, the initial state last; some decays are far below any that matters."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    shapes = {"head": (ROWS, LENGTH, HEADS), "channel": (ROWS, LENGTH, groups, width)}
    gates = -randn(*shapes[decay]).exp() if decay in shapes else None
    if gates is not None:
        gates[0, 3] = -torch.inf
    return {
        "q": randn(ROWS, LENGTH, groups, width).to(dtype),
        "k": torch.nn.functional.normalize(randn(ROWS, LENGTH, groups, width), dim=-1).to(dtype),
        "v": randn(ROWS, LENGTH, HEADS, width).to(dtype),
        "log_decay": gates,
        "beta": torch.rand(ROWS, LENGTH, HEADS, generator=g),
        "initial_state": randn(ROWS, HEADS, width, width),
    }


def results(op: Callable, tensors: dict[str, Tensor | None], **options: Any) -> list[Tensor]:
    """Outputs, final state and the gradient of a scalar of both with respect to every input."""
    leaves = {name: None if x is None else x.clone().requires_grad_() for name, x in tensors.items()}
    out, final = op(**leaves, **options)
    weights = [torch.linspace(-1, 1, x.numel()).view_as(x).sin() for x in (out, final)]
    loss = (out.float() * weights[0]).sum() + (final * weights[1]).sum()
    return [out, final, *torch.autograd.grad(loss, [x for x in leaves.values() if x is not None])]


CASES = [
    ("fla", "gated_linear_attention", "none", "chunk_simple_gla"),
    ("fla", "gated_linear_attention", "head", "chunk_simple_gla"),
    ("fla", "gated_linear_attention", "channel", "chunk_gla"),
    ("fla", "gated_delta_rule", "none", "chunk_delta_rule"),
    ("fla", "gated_delta_rule", "head", "chunk_gated_delta_rule"),
    ("fla", "gated_delta_rule", "channel", "chunk_kda"),
    ("flash_qla", "gated_delta_rule", "none", "chunk_gated_delta_rule"),
    ("flash_qla", "gated_delta_rule", "head", "chunk_gated_delta_rule"),
]


@pytest.mark.parametrize(("peer", "op", "decay", "function"), CASES)
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_a_peer_gets_what_it_expects(
    peer: str, op: str, decay: str, function: str, groups: int, installed: list[str]
) -> None:
    tensors = inputs(decay, groups, 128 if peer == "flash_qla" else WIDTH)
    if op == "gated_linear_attention":
        del tensors["beta"]
    call, options = getattr(ops, op), {"scale": 0.3}
    found = results(call, tensors, backend=peer, **options)
    assert installed == [f"{peer}.{function}"]
    wanted = results(call, tensors, backend="reference", **options)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    for x, y in zip(found, wanted, strict=True):
        # The same float32 formula; gradients of 16-bit inputs that several heads share are rounded before their sum.
        tolerance = 1e-5 if x.dtype == torch.float32 else 1e-2
        assert float((x.float() - y.float()).detach().norm()) <= tolerance * float(y.detach().norm())


def test_layers_and_subheads_reach_a_peer_by_the_environment(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs("head")
    tensors["v"] = tensors["v"][:, :, :2]  # 2 value heads of 2 states each
    plain = results(subhead_delta_rule, tensors, backend="reference")
    monkeypatch.setenv("LONGRECALL_BACKEND", "fla")
    found = results(subhead_delta_rule, tensors)
    assert installed == ["fla.chunk_gated_delta_rule"]
    for x, y in zip(found, plain, strict=True):
        # The reference adds up subheads in float32, a peer's outputs were rounded to bfloat16 (8 bits) before.
        assert float((x.float() - y.float()).detach().norm()) <= 1e-2 * float(y.detach().norm())
    mixer = mixer_config({"type": "gated_delta_net", "num_heads": 2, "key_dim": 64, "value_dim": 64}).build(32)
    x, mask = torch.randn(1, LENGTH, 32).bfloat16(), torch.arange(LENGTH)[None] >= 3
    outputs = []
    for chosen in ("chunked", "fla"):
        monkeypatch.setenv("LONGRECALL_BACKEND", chosen)
        y, state = mixer.bfloat16()(x, None, mask=mask, position=torch.zeros(1, dtype=torch.long))
        outputs.append((y.float(), state["recurrent"]))
    assert installed[1:] == ["fla.chunk_gated_delta_rule"]
    for plain_one, peers_one in zip(*outputs, strict=True):
        # q and k are rounded to bfloat16, 8 bits, for a peer alone.
        assert float((plain_one - peers_one).detach().norm()) < 2e-2 * float(plain_one.detach().norm())


def reason(peer: str, tensors: dict[str, Tensor | None], op: str = "gated_delta_rule") -> str:
    return str(peers.why_not(peer, op, {k: x for k, x in tensors.items() if k != "initial_state"}))


def test_what_peers_decline(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    head, linear = inputs("head", width=128), {k: x for k, x in inputs("head").items() if k != "beta"}
    assert reason("fla", head) == reason("flash_qla", head) == "None"
    assert reason("fla", linear, "selective_scan") == "flash-linear-attention has no selective_scan"
    assert reason("flash_qla", linear, "gated_linear_attention") == "FlashQLA has no gated_linear_attention"
    assert "with a decay per channel" in reason("flash_qla", inputs("channel", width=128))
    for dtype in ("float32", "float16"):
        made = inputs("head", dtype=getattr(torch, dtype))
        assert reason("fla", made) == f"values must be bfloat16, not {dtype}"
    assert "keys and values must be 128 wide, not 64 and 64" in reason("flash_qla", inputs("head"))
    assert "key widths of 64 to 256, not 32" in reason("fla", inputs("head", width=32))
    assert "key widths of 64 to 256, not 257" in reason("fla", inputs("none", width=257))
    assert "key widths of 64 to 512, not 513" in reason("fla", inputs("channel", width=513), "gated_linear_attention")
    mixed = {**linear, "q": linear["q"].float()}
    assert "one dtype; q has float32" in reason("fla", mixed, "gated_linear_attention")
    assert "float64" in reason("fla", {**head, "beta": head["beta"].double()})
    monkeypatch.setattr(peers, "_capturing", lambda: True)
    one = {name: None if x is None else x[:1] for name, x in head.items()}
    assert "no CUDA graph can record" in reason("flash_qla", one)
    assert reason("flash_qla", head) == reason("fla", one) == "None"
    monkeypatch.setattr(peers, "_on_gpu", lambda x: False)
    assert reason("fla", head) == "the tensors must be on a CUDA device, not on cpu"
    with pytest.raises(ValueError, match=r'backend "fla" cannot serve this call .* not on cpu'):
        gated_delta_rule(**head, backend="fla")
    assert installed == []


def test_gradients_that_triton_computes_wrongly(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    head = inputs("head")
    wanted = {**head, "v": head["v"].clone().requires_grad_()}
    linear = {k: x for k, x in wanted.items() if k != "beta"}
    versions = dict(VERSIONS)
    monkeypatch.setattr(peers, "_version", lambda name: versions.get(name))
    assert reason("fla", linear, "gated_linear_attention") == "None"
    versions["triton"] = "3.6.0"
    assert "3.7.1 is needed" in reason("fla", linear, "gated_linear_attention")
    with torch.no_grad():
        assert reason("fla", linear, "gated_linear_attention") == "None"
    assert reason("fla", wanted) == "None"  # tilelang has a kernel of its own
    monkeypatch.setenv("FLA_TILELANG", "0")
    assert "on Hopper and FLA_TILELANG is 0" in reason("fla", wanted)
    del versions["tilelang"]
    assert "on Hopper and tilelang is not installed" in reason("fla", wanted)
    assert reason("fla", head) == "None"
    assert "tilelang is not installed" in reason("flash_qla", inputs("head", width=128))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert reason("fla", wanted) == "None"


def test_why_nothing_of_a_peer_runs_here(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.why_not_here("fla") is None and peers.why_not_here("flash_qla") is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert peers.why_not_here("fla") is None
    assert peers.why_not_here("flash_qla") == "FlashQLA knows GPUs of compute capability 9.0, 10.0 and 10.3, not 8.9"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "compute capability 7.5; 8.0 or later" in str(peers.why_not_here("fla"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers.why_not_here("fla") == "there is no CUDA device"
    monkeypatch.setattr(peers, "_version", {"flash-linear-attention": "0.5.1", "flash-qla": "0.1.2"}.get)
    assert peers.why_not_here("fla") == "flash-linear-attention 0.5.1 is too old; 0.6 or later is needed"
    assert "0.1.2 is too old; 0.1.3 or later" in str(peers.why_not_here("flash_qla"))
    monkeypatch.setattr(peers, "_version", lambda name: None)
    assert "is not installed; pip install flash-linear-attention" in str(peers.why_not_here("fla"))


def test_a_package_that_does_not_import_is_a_reason(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ValueError("no such target\nsecond line")

    monkeypatch.setitem(sys.modules, "flash_qla", Broken("flash_qla"))
    text = "flash_qla.chunk_gated_delta_rule cannot be imported: ValueError: no such target"
    assert reason("flash_qla", inputs("head", width=128)) == text


class Elsewhere:
    """A tensor's metadata as of a GPU, for the choice alone."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    is_cuda = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)


def test_a_peer_is_taken_only_when_it_is_named(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {k: x for k, x in inputs("head", width=128).items() if k != "initial_state"}
    there: dict[str, Any] = {name: x if x is None else Elsewhere(x) for name, x in tensors.items()}
    choose = OPS["gated_delta_rule"].chosen
    assert choose(there) == "triton"
    assert choose(there, "fla") == "fla" and choose(there, "triton") == "triton"
    assert choose(tensors) == "chunked"
    monkeypatch.setattr(hopper_kernels, "inside", lambda *_: {})
    assert OPS["gated_delta_rule"].explain(there).why_not["fla"] == "taken only when it is named"
    monkeypatch.setenv("LONGRECALL_BACKEND", "chunked")
    assert choose(there) == "chunked" and choose(there, "flash_qla") == "flash_qla"


def test_info_lists_them(installed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(peers, "_version", {**VERSIONS, "fla-core": None}.get)
    assert main(["info", "--backends"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    states = {line[0]: " ".join(line[1:]) for line in lines if line and line[0] in peers.PEERS}
    text = "\n".join(" ".join(line) for line in lines)
    assert "fla not usable: flash-linear-attention is not installed" in text
    assert "flash_qla usable FlashQLA's kernels" in text
    assert states["fla"] == "serves gated_delta_rule, gated_linear_attention"
    assert states["flash_qla"] == "serves gated_delta_rule"
