"""Models of transformers whose rows ranks share (`sharding.context_parallel`).

transformers' layers call the attention that the model's config names, with the keywords that the
body was given. Ours is registered under a name of its own: it takes the rows from `shared_rows`,
and does what our own decoder does. Masks are not made for it. Recurrent layers get the same keyword
(`documents.py`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.modules.attention.cut_rows import attend_cut_rows
from qfsdp.modules.shared_rows import SharedRows

NAME = "qfsdp_shared_rows"
ARCHITECTURES = {
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM"),
    *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    *("Qwen3NextForCausalLM", "Lfm2ForCausalLM", "FalconH1ForCausalLM"),
}
"""Those that tests/modules/test_hub_cut_rows.py compares with whole rows."""


def share_attention(hf: Any) -> None:
    """Gives all layers of transformers' model the attention of rows in parts."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    hf.set_attn_implementation(NAME)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    shared_rows: SharedRows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: `[batch, heads, tokens, size]` of each, values of at
    most the size of keys -> `[batch, tokens, heads, size]`."""
    if shared_rows is None or softcap is not None or attention_mask is not None:
        raise ValueError("sharding.context_parallel: attention takes parts of rows, no more")
    size = value.shape[3]
    value = F.pad(value, (0, query.shape[3] - size))  # latent attention
    kind = (sliding_window, scaling, shared_rows.group)
    found = attend_cut_rows(query, key, value, s_aux, shared_rows.rows, *kind)
    return found.transpose(1, 2)[..., :size], None
