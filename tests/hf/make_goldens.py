"""Makes tiny public checkpoints with the reference library's results: needs torch and transformers, which moex does not.

`python tests/hf/make_goldens.py FAMILY FOLDER` writes into FOLDER `config.json` and `model.safetensors` as the library saves
them, and `expected.safetensors`: `input_ids`, `logits`, `loss` (mean over next tokens, without auxiliary losses),
`router_logits.I` of the I-th MoE layer, `aux_loss` where the family has one, and `grad.NAME` of the loss by every tensor.
`further FOLDER` makes one with a layer that predicts a further token; `loss` is that of the model and 0.1 of that layer's.
`quantised FILE` writes codes and their numbers, `positions FILE` cosines and sines. All in float32 on a CPU; the files in
tests/goldens were made with transformers 5.24.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = dict(
    vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, num_experts_per_tok=2, attn_implementation="eager", dtype="float32",
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1
)
CASES = dict(
    mixtral=dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
    qwen2_moe=dict(
        intermediate_size=64, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=8,
        num_experts_per_tok=3, decoder_sparse_step=2, num_hidden_layers=4,
    ),
    qwen3_moe=dict(intermediate_size=64, moe_intermediate_size=24, num_experts=8, head_dim=16, norm_topk_prob=True),
    olmoe=dict(intermediate_size=24, num_experts=8, num_key_value_heads=4, norm_topk_prob=False),
    gpt_oss=dict(
        intermediate_size=32, num_local_experts=4, head_dim=16, sliding_window=8,
        rope_parameters=YARN | dict(factor=32.0, original_max_position_embeddings=4096, rope_theta=150_000.0, truncate=False),
    ),
    deepseek_v2=LATENT | dict(
        intermediate_size=64, moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1,
        num_hidden_layers=3, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0,
        q_lora_rank=None, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
    ),
    deepseek_v3=LATENT | dict(
        intermediate_size=64, moe_intermediate_size=24, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        first_k_dense_replace=1, num_hidden_layers=3, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    ),
    glm4_moe=dict(
        intermediate_size=64, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, head_dim=16,
        attention_bias=True, use_qk_norm=True, first_k_dense_replace=1, num_hidden_layers=3, routed_scaling_factor=2.5,
        num_mtp_layers=0,
    ),
)  # fmt: skip


def build(family: str, seed: int = 0):
    """A model whose every parameter matters: nothing is zero or one."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **SIZES | CASES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            value.copy_(around + 0.2 * torch.randn(value.shape))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.2 * torch.randn(value.shape))
    return model


def router_logits(model, ids) -> list[torch.Tensor]:
    """What each router gives, in the order of the layers."""
    found = []
    routers = [m for name, m in model.named_modules() if name.rpartition(".")[2] in ("gate", "router")]
    take = lambda _, __, out: found.append((out[0] if isinstance(out, tuple) else out).detach().flatten(0, -2))
    handles = [module.register_forward_hook(take) for module in routers]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def saved(model, folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of the public files."""
    model.save_pretrained(folder, save_original_format=True)
    return load_file(folder / "model.safetensors")


def make(family: str, folder: Path) -> None:
    model = build(family)
    saved(model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, model.config.vocab_size, (2, 24))
    out = model(ids, labels=ids)
    out.loss.backward()
    results = dict(input_ids=ids.int(), logits=out.logits.detach(), loss=out.loss.detach()[None])
    results |= {f"router_logits.{i}": x for i, x in enumerate(router_logits(model, ids))}
    if "output_router_logits" in model.config and getattr(model.config, "router_aux_loss_coef", 0):
        results["aux_loss"] = model(ids, labels=ids, output_router_logits=True).aux_loss.detach().reshape(1)
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for value, source in zip(gradients.parameters(), model.parameters(), strict=True):
            value.copy_(source.grad)
    with tempfile.TemporaryDirectory() as there:
        named = saved(gradients, Path(there))
    kept = {f"grad.{name}": x for name, x in named.items() if not name.endswith("e_score_correction_bias")}
    save_file({name: x.contiguous() for name, x in (results | kept).items()}, folder / "expected.safetensors")


def make_further(folder: Path) -> None:
    """DeepSeek-V3 with one layer of multi-token prediction, by the library's own module for drafting."""
    from transformers.modeling_layers import MtpModel

    CASES["deepseek_v3"] |= dict(num_hidden_layers=2, n_routed_experts=8, n_group=2, topk_group=1, num_mtp_layers=1)
    model = build("deepseek_v3")
    mtp = MtpModel(model, 1).eval()
    own = dict(mtp.layers[0].named_parameters())
    with torch.no_grad():
        for name, value in own.items():
            value.copy_((1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(value.shape))
        bias = mtp.layers[0].mtp_block.mlp.gate.e_score_correction_bias
        bias.copy_(0.2 * torch.randn(bias.shape))
    tensors = saved(model, folder) | public_layer(mtp, "model.layers.2", lambda x: x)
    tensors["model.layers.2.mlp.gate.e_score_correction_bias"] = bias
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)

    ids = torch.randint(0, model.config.vocab_size, (2, 24))
    hidden = model.model(ids).last_hidden_state
    places = torch.arange(23).expand(2, -1)
    further = model.lm_head(mtp.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[:, 1:]))
    mean = lambda scores, labels: torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
    own_loss, further_loss = mean(model.lm_head(hidden)[:, :-1], ids[:, 1:]), mean(further[:, :-1], ids[:, 2:])
    (own_loss + 0.1 * further_loss).backward()
    results = dict(input_ids=ids.int(), loss=(own_loss + 0.1 * further_loss)[None], further_loss=further_loss[None])
    results |= dict(logits=model.lm_head(hidden), further_logits=further)
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for value, source in zip(gradients.parameters(), model.parameters(), strict=True):
            value.copy_(source.grad)
    with tempfile.TemporaryDirectory() as there:
        named = saved(gradients, Path(there)) | public_layer(mtp, "model.layers.2", lambda x: x.grad)
    results |= {f"grad.{name}": x for name, x in named.items() if not name.endswith("e_score_correction_bias")}
    save_file({name: x.detach().contiguous() for name, x in results.items()}, folder / "expected.safetensors")


def public_layer(mtp, at: str, take) -> dict[str, torch.Tensor]:
    """The further layer's tensors, or what `take` makes of them, by the names of public files."""
    found = {}
    for name, value in mtp.layers[0].named_parameters():
        public = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        values = take(value)
        if ".experts." not in name:
            found[f"{at}.{public}"] = values
            continue
        for e, one in enumerate(values):
            parts = (
                dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True))
                if "gate_up" in name
                else dict(down_proj=one)
            )
            found |= {f"{at}.mlp.experts.{e}.{part}.weight": x for part, x in parts.items()}
    return found


def positions(file: Path) -> None:
    """cos and sin of the rotated pairs at positions 0 to 31, [32, pairs], with the scale of features, by family."""
    found = {}
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe"):
        rotary = build(family).model.rotary_emb
        out = rotary(torch.zeros(1, 32, 32), torch.arange(32)[None])
        cos, sin = (out.real, out.imag) if torch.is_tensor(out) else out  # DeepSeek-V2 has complex numbers
        pairs = rotary.inv_freq.shape[0]  # the others may have each pair's angle twice
        found |= {f"{family}.cos": cos[0, :, :pairs].contiguous(), f"{family}.sin": sin[0, :, :pairs].contiguous()}
    save_file(found, file)


def quantised(file: Path) -> None:
    """Codes with scales and what the library makes of them: MXFP4 with every code and extreme exponents; FP8 blocks."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    blocks[0, :, 0] = torch.arange(96, dtype=torch.uint8).reshape(6, 16)
    scales = torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([1, 127, 254])
    values = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    codes = (torch.randn(256, 384) * 100).to(torch.float8_e4m3fn)
    factors = torch.rand(2, 3) * 1e-3 + 1e-5
    numbers = Fp8Dequantize(None)._dequantize_one(codes, factors, torch.float32)
    mxfp4 = {"mxfp4.x_blocks": blocks, "mxfp4.x_scales": scales, "mxfp4.expected": values.contiguous()}
    fp8 = {"fp8.x": codes.view(torch.uint8), "fp8.x_scale_inv": factors, "fp8.expected": numbers.float().contiguous()}
    save_file(mxfp4 | fp8, file)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    special = dict(quantised=quantised, further=make_further, positions=positions)
    special[what](where) if what in special else make(what, where)
