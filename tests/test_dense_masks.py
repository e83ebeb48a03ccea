"""Dense masks as ``generate`` makes them for static caches, turned back into what they were made from."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CACHE_ARG, config
from transformers.masking_utils import create_masks_for_generate

from lragent_hf.attention.masks import WindowMask
from lragent_hf.buffer import GrowableBuffer
from lragent_hf.dense_masks import padding_of, without_squares


class Static(SimpleNamespace):
    """As much of a static cache as the mask functions of transformers ask for."""

    is_sliding = (False,)
    is_compileable = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.width, 0


@settings(max_examples=200)
@given(
    past=st.integers(0, 12), count=st.integers(1, 9), spare=st.integers(0, 5), window=st.sampled_from((None, 1, 3, 8, 40)),
    pads=st.lists(st.integers(0, 25), min_size=1, max_size=3), hybrid=st.booleans(),
)  # fmt: skip
def test_they_say_what_the_padding_was(
    past: int, count: int, spare: int, window: int | None, pads: list[int], hybrid: bool
) -> None:
    stop, rows = past + count, len(pads)
    bits = torch.ones(rows, stop, dtype=torch.bool)
    for row, pad in enumerate(pads):
        bits[row, : min(pad, stop - 1)] = False
    record = GrowableBuffer(1)
    if past:
        record.write(0, bits[:, :past])
    cfg = config("mistral", sliding_window=window, attn_implementation="sdpa")
    if hybrid and window is not None:
        cfg.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    masks = create_masks_for_generate(
        config=cfg, inputs_embeds=torch.empty(rows, count, 0), attention_mask=bits.long(),
        position_ids=torch.arange(past, stop)[None], **{CACHE_ARG: Static(past=past, width=stop + spare)},
    )  # fmt: skip
    found = padding_of(masks, past, count, record, past, window)
    if found is None:  # nothing to say: no padding, no window left
        assert bits.all()
        return
    assert torch.equal(found.expand(rows, -1), bits)
    plain = without_squares(masks, found, stop, window, dense=False)
    for kind, mask in (plain if isinstance(plain, dict) else {"": plain}).items():
        reach = window if kind != "full_attention" and window is not None and window < stop else None
        if reach is None and bool(bits.all()):
            assert mask is None
        else:
            assert isinstance(mask, WindowMask)
            assert mask.window == reach
            assert torch.equal(mask.as_subclass(torch.Tensor).expand(rows, -1), bits)
    cut = without_squares(masks, found, stop, window, dense=True)
    for mask in cut.values() if isinstance(cut, dict) else (cut,):
        assert mask is None or mask.shape[-1] == stop


def test_a_mask_that_is_not_causal_stays_as_it_is() -> None:
    mask = torch.ones(1, 1, 4, 9, dtype=torch.bool).tril(5)
    mask[0, 0, 1, 2] = False
    bits = padding_of(mask, 5, 4, GrowableBuffer(1), 0, None)
    assert bits is not None
    assert without_squares(mask, bits, 9, None, dense=False) is not None
    assert torch.equal(without_squares(mask, bits, 9, None, dense=False), mask)
    assert without_squares(None, None, 9, None, dense=False) is None
