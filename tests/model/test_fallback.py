"""Architectures without a native decoder, through transformers with our attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.model.decoder import DenseCausalAttention, load_decoder
from engine.model.memory import weight_bytes

TINY: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(architecture: str, directory: Path, **fields: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**(TINY | fields))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    model.save_pretrained(directory)
    return model


SERVED: list[tuple[str, dict[str, Any]]] = [
    ("StableLm", {}),
    ("Cohere2", {"sliding_window": 7}),
    ("Starcoder2", {"sliding_window": 7}),
    ("Glm4", {"head_dim": 16}),
    ("GPTBigCode", {"n_positions": 256}),
    ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
]


@pytest.mark.parametrize(("architecture", "fields"), SERVED, ids=[name for name, _ in SERVED])
def test_gives_the_logits_and_greedy_tokens_of_transformers_in_chunks(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    theirs = make(architecture, tmp_path, **fields)
    spec = load_spec(tmp_path)
    assert spec.family == "transformers"
    decoder = load_decoder(spec, tmp_path)
    attend = DenseCausalAttention(spec)
    tokens = torch.randint(3, 384, (40,)).tolist()
    rows = []
    with torch.inference_mode():
        for at, size in ((0, 11), (11, 1), (12, 28), *((40 + i, 1) for i in range(24))):
            chunk = torch.tensor(tokens[at : at + size])
            rows.append(decoder.logits(decoder.forward(chunk, torch.arange(at, at + size), attend)))
            if at >= 12:
                tokens.append(int(rows[-1][-1].argmax()))
        expected = theirs(torch.tensor([tokens[:-1]])).logits[0]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=0)
    assert tokens[40:] == expected[39:].argmax(-1).tolist()


def test_windows_and_shapes_are_found_in_its_code(tmp_path: Path) -> None:
    model = make("Cohere2", tmp_path, sliding_window=7, num_hidden_layers=4)
    spec = load_spec(tmp_path)
    assert [layer.window for layer in spec.layers] == [7, 7, 7, 0]
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.max_position) == (4, 2, 16, 256)
    tied = sum(parameter.numel() for parameter in model.parameters())
    assert weight_bytes(spec, tmp_path, dtype="bfloat16", quantization="none") == 2 * tied


@pytest.mark.parametrize(
    ("architecture", "fields", "says"),
    [
        ("Bloom", {}, "0 of its 3 layers take attention from outside"),
        ("Mamba", {}, "0 of its 3 layers take attention from outside"),
        ("GptOss", {"num_local_experts": 4, "head_dim": 16}, "its attention uses"),
        ("Falcon", {}, "its code can't be run"),
        ("T5Gemma", None, "encoder-decoder"),
    ],
)
def test_refuses_in_one_line_what_our_attention_cannot_serve(
    architecture: str, fields: dict[str, Any] | None, says: str, tmp_path: Path
) -> None:
    if fields is None:
        (tmp_path / "config.json").write_text('{"architectures": ["T5GemmaForX"], "is_encoder_decoder": true}')
    else:
        make(architecture, tmp_path, **fields)
    with pytest.raises(ConfigError, match=says) as caught:
        load_spec(tmp_path)
    assert "\n" not in str(caught.value)


def test_refuses_code_that_takes_positions_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("StableLm", tmp_path)
    spec = load_spec(tmp_path)
    body = transformers.StableLmModel.forward

    def counting_from_zero(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return body(self, input_ids, **kwargs)

    monkeypatch.setattr(transformers.StableLmModel, "forward", counting_from_zero)
    with pytest.raises(ConfigError, match="hidden states through our attention are off by"):
        load_decoder(spec, tmp_path)


def test_an_unknown_architecture_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"], "model_type": "new"}')
    with pytest.raises(ConfigError, match="transformers doesn't know") as caught:
        load_spec(tmp_path)
    assert "\n" not in str(caught.value)
