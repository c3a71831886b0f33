"""The text model of a model that sees, as docs/guide/faq.md cuts it out."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from tests.tiny import ROOT, write_tiny_model_with_tokenizer

NAME, FOLDER = "google/gemma-3-27b-it", "models/gemma-3-27b-it"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 131, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 7}
SEEN = {**SIZES, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}


@pytest.mark.long
def test_the_guide_writes_the_text_model_of_gemma(
    tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    monkeypatch.chdir(tmp_path)
    write_tiny_model_with_tokenizer(Path(NAME), smollm2_dir)
    torch.manual_seed(0)
    tokens = {"image_token_index": 130, "boi_token_index": 128, "eoi_token_index": 129}
    config = Gemma3Config(
        text_config={**TEXT, "num_key_value_heads": 2},
        vision_config=SEEN,
        mm_tokens_per_image=4,
        **tokens,
    )
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(NAME)
    with pytest.raises(Exception, match="takes more than text.*faq.md writes it"):
        DecoderConfig.from_dir(NAME)
    guide = (ROOT / "docs/guide/faq.md").read_text()
    script = re.search(r"( {4}import torch\n.*?)\n\n\*\*", guide, re.DOTALL)
    assert script is not None
    exec(textwrap.dedent(script[1]), {})

    assert json.loads(Path(FOLDER, "config.json").read_text())["model_type"] == "gemma3_text"
    decoder = Decoder(DecoderConfig.from_dir(FOLDER))
    decoder.load_state_dict(load_file(f"{FOLDER}/model.safetensors"), strict=False)
    ids = torch.randint(1, 120, (1, 20))
    with torch.no_grad():
        expected, found = whole(input_ids=ids).logits, decoder(ids)
    assert (found - expected).abs().max() < 1e-4 and expected.std() > 0.1
    assert Path(FOLDER, "tokenizer.json").exists()
