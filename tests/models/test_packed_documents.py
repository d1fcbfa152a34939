"""Documents side by side in a row, as transformers' collators tell of them: each is read as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.test_transformers_trainer import model_of

LENGTHS = ((1, 4, 7), (5, 6, 1))
"""Documents of two rows of twelve tokens; those of one token too."""


def ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(3))


def told(kind: str) -> torch.Tensor:
    rows = []
    for lengths in LENGTHS:
        places = [range(n) if kind == "position_ids" else [i] * n for i, n in enumerate(lengths)]
        rows.append([place for part in places for place in part])
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", ["position_ids", "seq_idx"])
def test_every_document_of_every_row_is_read_alone(kind: str) -> None:
    model, x = model_of("gla_conv", "mamba2", "retrieval", "attention", "parallel", "kda_subheads").eval(), ids()
    with torch.no_grad():
        found = model(x, labels=x, output_hidden_states=True, **{kind: told(kind)})
        assert found.logits.shape == (2, 12, 258) and found.hidden_states[0].shape == (2, 12, 32)
        parts = [part for row, lengths in zip(x, LENGTHS, strict=True) for part in row.split(lengths)]
        alone = torch.cat([model(part[None]).logits[0] for part in parts]).view_as(found.logits)
    # float32 logits of magnitude 1 to 5, sums in another order.
    assert (found.logits - alone).abs().max() < 1e-4
    assert not torch.allclose(model(x).logits, found.logits, atol=1e-2)
    assert found.past_key_values.position.tolist() == [n for lengths in LENGTHS for n in lengths]


def test_boundaries_of_flash_attention_are_ours() -> None:
    model, x = model_of("gla_conv", "mamba2").eval(), ids()[:1]
    ends = torch.tensor([0, 1, 5, 12], dtype=torch.int32)
    more: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        assert torch.equal(model(x, **more).logits, model(x, cu_seqlens=ends).logits)
        one = {**more, "cu_seq_lens_q": torch.tensor([0, 12])}
        assert torch.equal(model(x, **one).logits, model(x).logits)
    with pytest.raises(ValueError, match="cu_seq_lens_q packs documents into one row; got 2 rows"):
        model(ids(), **more)


def test_positions_that_only_count_change_nothing() -> None:
    model, x = model_of("gla_conv", "retnet").eval(), ids()
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        plain = model(x)
        for positions in (torch.arange(12)[None], torch.arange(12).expand(2, 12), torch.arange(7, 19)[None]):
            assert torch.equal(model(x, position_ids=positions).logits, plain.logits)
        padded = model(x, attention_mask=mask).logits
        assert torch.equal(model(x, attention_mask=mask, position_ids=counted).logits, padded)
        after = model(x[:, :1], past_key_values=plain.past_key_values, position_ids=torch.tensor([[12]]))
        assert after.past_key_values.position.tolist() == [13, 13]


@pytest.mark.parametrize("kind", ["position_ids", "seq_idx"])
def test_documents_among_padding_are_refused(kind: str) -> None:
    model, x = model_of("gla").eval(), ids()
    mask = torch.ones_like(x)
    mask[1, -1] = 0
    with pytest.raises(ValueError, match=f"{kind} puts several documents into a row that has padding too"):
        model(x, attention_mask=mask, **{kind: told(kind)})
    with pytest.raises(ValueError, match=rf"{kind} must be \[2, 12\]; got \[2, 11\]"):
        model(x, **{kind: told(kind)[:, :-1]})


def test_a_label_behind_padding_has_no_loss() -> None:
    model, x = model_of("gla", "mamba2").eval(), ids()
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    labels = x.masked_fill(mask == 0, -100)
    with torch.no_grad():
        alone = [(model(x[:1, 5:], labels=x[:1, 5:]).loss, 6), (model(x[1:], labels=x[1:]).loss, 11)]
        expected = sum(float(loss) * count for loss, count in alone) / 17
        assert float(model(x, attention_mask=mask, labels=labels).loss) == pytest.approx(expected, rel=1e-5)
        # 18 were counted, the token behind the padding among them: the mean stays a mean.
        counted = model(x, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(18)).loss
        assert float(counted) == pytest.approx(expected, rel=1e-5)
        nothing = torch.full_like(x, -100)
        nothing[0, 5] = 7
        assert float(model(x, attention_mask=mask, labels=nothing, num_items_in_batch=1).loss) == 0.0
