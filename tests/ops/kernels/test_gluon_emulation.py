"""The emulation of Gluon notices what a GPU would do wrong: a small kernel, broken in one line after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.gluon_emulation import Hazard, execute, load
from tests.ops.gluon_emulation.ptx import run

SOURCE = '''
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from longrecall.ops.kernels.gluon import async_load, barrier, gluon_kernel

SIZE = gl.constexpr(64)
TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))


@gluon.jit
def send(ring, slot, a, b, n, T, chunks):
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, ROWS))[None, :]
    if n < chunks:
        place = (n * SIZE + row) * SIZE + column
        async_load(ring[0].index(slot), a + place, mask=n * SIZE + row < T)
        async_load(ring[1].index(slot), b + place, mask=n * SIZE + row < T)
    async_copy.commit_group()


@gluon_kernel
def sums_kernel(a, b, out, T, chunks):
    """a^T b over T rows, and twice that: a program each."""
    ring = (gl.allocate_shared_memory(gl.bfloat16, [2, SIZE, SIZE], TILE),
            gl.allocate_shared_memory(gl.bfloat16, [2, SIZE, SIZE], TILE))
    result = gl.allocate_shared_memory(gl.float32, [SIZE, SIZE], TILE)
    total = gl.zeros([SIZE, SIZE], gl.float32, SUMS)
    slot = 0
    send(ring, slot, a, b, 0, T, chunks)
    for n in range(chunks):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        left, right = ring[0].index(slot), ring[1].index(slot)
        total = warpgroup_mma(left.permute((1, 0)), right, total, is_async=True)
        slot = 1 - slot
        send(ring, slot, a, b, n + 1, T, chunks)
        total = warpgroup_mma_wait(0, deps=[total])
    total *= 1.0 + gl.program_id(0).to(gl.float32)
    result.store(total)
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(1, ROWS))[:, None]
    place = column * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, ROWS))[None, :]
    gl.store(out + gl.program_id(0) * (SIZE * SIZE) + place, result.load(ROWS), mask=column < SIZE)
'''

T = 150


def sums(source: str) -> tuple[Tensor, Tensor]:
    """What the kernel finds, and the formula."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(T, 64, generator=generator).bfloat16() for _ in range(2))
    out = torch.full((2, 64, 64), float("nan"))
    execute(source).sums_kernel[(2,)](a, b, out, T, -(-T // 64), num_warps=4)
    right = a.double().T @ b.double()
    return out.double(), torch.stack((right, 2 * right))


def broken(line: str, otherwise: str) -> str:
    """The kernel with another line in place of one that it has once."""
    assert SOURCE.count(line) == 1
    return SOURCE.replace(line, otherwise)


def test_the_kernel_as_it_is() -> None:
    found, right = sums(SOURCE)
    # Sums of 150 products of bfloat16 in float32.
    assert torch.allclose(found, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("line", "otherwise", "message"),
    [
        ("async_copy.wait_group(0)", "async_copy.wait_group(1)", "a product of what a copy that has not been waited"),
        ("    async_copy.commit_group()", "    pass", "a product of what a copy that has not been waited for"),
        ("        fence_async_shared()", "        pass", "a product of what was written, before a fence"),
        ("        barrier()", "        pass", "a product of what was written, before a barrier"),
        ("        slot = 1 - slot", "        pass", "a copy where a product reads that has not been waited for"),
        ("wait(0, deps=[total])", "wait(1, deps=[total])", "a copy where a product reads"),
        ("total = warpgroup_mma_wait(0, ", "warpgroup_mma_wait(0, ", "a product's result is used that has not been"),
        ("        total = warpgroup_mma_wait(0, deps=[total])", "    warpgroup_mma_wait(0, deps=[total])",
         "a copy where a product reads"),
        ("        total = warpgroup_mma_wait(0, deps=[total])",
         "        total = warpgroup_mma_wait(0, deps=[total])\n        left.store(left.load(ROWS))",
         "a store where a product has read, before a barrier"),
        ("        left, right =", "        ring[1].index(slot).load(ROWS)\n"
         "        send(ring, slot, a, b, n, T, chunks)\n        left, right =", "a copy where threads have loaded"),
        ("    for n in range(chunks):", "    ring[0].index(0).load(ROWS)\n    for n in range(chunks):",
         "a load where a copy is on its way"),
        ("    for n in range(chunks):", "    left = ring[0].index(0)\n    left.store(total.to(gl.bfloat16))\n"
         "    for n in range(chunks):", "a store where a copy is on its way"),
        ("        barrier()", "        ring[0].index(slot).load(ROWS)\n        barrier()",
         "a load of what a copy brought, before a barrier"),
        ("range(chunks)", "range(chunks - 1)", "copies that nobody has waited for"),
        ("b + place, mask=n * SIZE + row < T", "b + place, mask=n * SIZE + row <= T",
         "places 8192 to 9663 of a tensor"),
        ("gl.program_id(0) * (SIZE * SIZE) + place", "place", "two programs of a launch meet"),
        ("    place = column * SIZE +", "    place = column * 0 +", "threads write different numbers to one place"),
        ("    gl.store(out", "    a = out\n    gl.load(a + place)\n    gl.store(out", "two programs of a launch meet"),
        ("        slot = 1 - slot", "        slot = n + 1", "buffer 2 of 2"),
        ("left.permute((1, 0)), right, total", "left.slice(0, 32, 1).permute((1, 0)), right, total", "onto"),
        ("result.store(total)", "result.store(total.to(gl.bfloat16))", "bfloat16 .* stored to .*float32"),
        ("slot, a, b, n + 1, T", "slot, a, b, (n - 1) // 2 + 2, T", "Triton rounds towards zero"),
        ("    row = gl.arange(0, SIZE,", "    row = gl.arange(0, SIZE - 1,", "a range of 63"),
    ],
)  # fmt: skip
def test_a_broken_line_is_noticed(line: str, otherwise: str, message: str) -> None:
    with pytest.raises(Hazard, match=message):
        sums(broken(line, otherwise))


@pytest.mark.parametrize(
    ("line", "otherwise"),
    [
        ("left.permute((1, 0)), right", "right.permute((1, 0)), left"),
        ("ring[1].index(slot), b + place, mask=n * SIZE + row < T", "ring[1].index(slot), b + place, mask=row < 22"),
        ("total, is_async=True", "total, use_acc=False, is_async=True"),
        ("mask=column < SIZE", "mask=column < SIZE - 1"),
    ],
)
def test_other_numbers_are_other_numbers(line: str, otherwise: str) -> None:
    found, right = sums(broken(line, otherwise))
    assert not torch.allclose(found, right, rtol=0, atol=1e-2)


def test_what_is_not_emulated_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"gl\.cumsum is not emulated"):
        sums(broken("    result.store(total)", "    result.store(gl.cumsum(total))"))
    with pytest.raises(NotImplementedError, match=r"hopper\.tma is not emulated"):
        sums(broken("import fence_async_shared,", "import fence_async_shared, tma,"))
    with pytest.raises(NotImplementedError, match=r"sin\.approx\.f32 is not emulated"):
        run("sin.approx.f32 $0, $1;", "=f,f", [torch.zeros(4)], torch.float32, 1)


@pytest.mark.parametrize("values", [1, 2, 4, 8])
def test_sums_over_a_warp(values: int) -> None:
    lines = [f"mov.b32 a{i}, ${i + 1};" for i in range(values)]
    asm = ".reg .pred p; " + " ".join([*lines, *load("expansion.hopper.streams").summing(values), "mov.b32 $0, a0;"])
    given = list(torch.randn(values, 3, 32, generator=torch.Generator().manual_seed(values)))
    found = run(asm, ",".join(["=f"] + ["f"] * values), given, torch.float32, 1)
    for place, x in enumerate(given):
        # 31 additions of numbers of about 1 in float32.
        assert torch.allclose(found[:, 32 // values * place], x.sum(-1), rtol=0, atol=1e-5)


def test_registers_hold_bits() -> None:
    x = torch.tensor([[1.5, -2.25, 3.0e-30, 7.0]]).bfloat16()
    asm = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    assert torch.equal(run(asm, "=&r,=&r,r", [x], torch.float32, 2), x.float())
    asm = "mul.f32 $0, $1, 0f40000000;"
    assert torch.equal(run(asm, "=f,f", [x.float()], torch.float32, 1), 2 * x.float())
    tiny = torch.tensor([-200.0, -3.0])
    assert torch.equal(run("ex2.approx.ftz.f32 $0, $1;", "=f,f", [tiny], torch.float32, 1), torch.tensor([0.0, 0.125]))
    with pytest.raises(Hazard, match=r"\$0 is written before all inputs are read"):
        run("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], torch.float32, 2)
    with pytest.raises(Hazard, match="1 results and 1 inputs"):
        run("mov.b32 $0, $1;", "=f,f,f", [x.float()], torch.float32, 1)
    with pytest.raises(Hazard, match="which has no axis of 32 lanes"):
        run("shfl.sync.bfly.b32 $0, $1, 16, 31, -1;", "=f,f", [x.float()], torch.float32, 1)
