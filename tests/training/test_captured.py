from __future__ import annotations

import pytest
import torch
from torch import nn

from longrecall.training.captured import CapturedStep, capturable_adamw

CPU = torch.device("cpu")


def test_a_step_without_a_gpu_is_the_plain_step() -> None:
    """Two groups with rates and decays of their own, against torch's AdamW with rates set by hand."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = capturable_adamw({(0.1, 0.5): [ours.weight], (0.01, 0.0): [ours.bias]}, CPU, (0.9, 0.99))
    groups = [{"params": [theirs.weight], "weight_decay": 0.5}, {"params": [theirs.bias], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    x, order = torch.zeros(4, 3), []

    def work() -> None:
        order.append("work")
        ours(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step = CapturedStep(work, optimizer, CPU, forget=lambda: order.append("forgotten"))
    assert order == [] and step.stream is None  # nothing is warmed up, so there is nothing to forget
    for index, factor in enumerate((1.0, 0.5, 0.25)):
        batch = torch.full((4, 3), float(index + 1))

        def fill(factor: float = factor, batch: torch.Tensor = batch) -> None:
            order.append("before")
            step.set_rates(factor)
            x.copy_(batch)

        step.run(fill, lambda: order.append("after"))
        for group, peak in zip(plain.param_groups, (0.1, 0.01), strict=True):
            group["lr"] = peak * factor
        theirs(batch).square().sum().backward()
        plain.step()
        plain.zero_grad()
    assert order == ["before", "work", "after"] * 3
    # Fused and plain AdamW round in another order, in float32.
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=1e-5, atol=1e-6)
    step.release()
    with pytest.raises(RuntimeError, match="released"):
        step.run(lambda: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recording_leaves_no_trace() -> None:
    device = torch.device("cuda")
    parameter = nn.Parameter(torch.ones(3, device=device))
    optimizer = capturable_adamw({(0.1, 0.5): [parameter]}, device)
    total = torch.zeros((), device=device)

    def work() -> None:
        loss = (parameter**2).sum()
        total.add_(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step = CapturedStep(work, optimizer, device, forget=total.zero_)
    assert total.item() == 0 and torch.equal(parameter.detach().cpu(), torch.ones(3))
    step.run(lambda: step.set_rates(1.0))
    torch.cuda.synchronize()
    reference = nn.Parameter(torch.ones(3))
    plain = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.5, betas=(0.9, 0.95))
    (reference**2).sum().backward()
    plain.step()
    assert total.item() == 3
    # One step in float32 on two devices.
    torch.testing.assert_close(parameter.detach().cpu(), reference.detach(), rtol=1e-6, atol=1e-6)
