"""Small models of Hugging Face's, by the blocks that ``"auto"`` finds: the gradient is that of recorded steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist

transformers = pytest.importorskip("transformers")

WORDS = torch.arange(12).reshape(2, 6) % 11
MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "attn_implementation": "sdpa",
}


def _words(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=WORDS, attention_mask=MASK, labels=WORDS, use_cache=False).loss
    return loss


def _masked_words(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=WORDS, attention_mask=MASK, labels=WORDS).loss
    return loss


def _pictures(model: Any) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=draw)
    made: Tensor = model(pixel_values=pixels).last_hidden_state
    return made.square().mean()


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=3, n_head=2, n_positions=8, attn_implementation="sdpa"
    )
    return transformers.GPT2LMHeadModel(config)  # with a tied embedding


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))


def _bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, max_position_embeddings=8))


def _vit() -> Any:
    sizes = {**SMALL, "image_size": 8, "patch_size": 4}
    del sizes["vocab_size"]
    return transformers.ViTModel(transformers.ViTConfig(**sizes), add_pooling_layer=False)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=16, num_layers=3, num_heads=2, decoder_start_token_id=0
    )  # whose attention has a learned bias
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "GPT-2": (_gpt2, _words),
    "Llama": (_llama, _words),
    "BERT": (_bert, _masked_words),
    "ViT": (_vit, _pictures),
    "T5": (_t5, _words),
}


@pytest.mark.parametrize("name", MODELS)
def test_replayed_blocks_have_the_gradient_of_recorded_steps(name: str) -> None:
    torch.manual_seed(0)
    make, loss_of = MODELS[name]
    model = make().double().train()
    scale = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)

    def gradients(adjoint: todist.Adjoint) -> tuple[Tensor, ...]:
        adapted = todist.inner_loop(
            lambda model: scale * loss_of(model),
            todist.adam(lr=0.01, eps=1e-3),
            model,
            3,
            meta=scale,
            adjoint=adjoint,
            seed=1,
        )
        torch.manual_seed(1)
        return torch.autograd.grad(loss_of(adapted.params), [scale, *model.parameters()], allow_unused=True)

    expected = gradients(todist.Recorded())
    for adjoint in (todist.Replayed(), todist.Replayed(blocks="auto", snapshots=2)):
        for one, other in zip(gradients(adjoint), expected, strict=True):
            # Llama and T5 normalize in float32, whatever their parameters are.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
