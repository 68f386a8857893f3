"""Tiny models that SGLang serves in seconds on a CPU: a config and a byte-level tokenizer, no weights on
disk.

Servers start with ``--load-format dummy``: the weights come from a fixed seed, so two servers of one model
directory compute the same KV bytes, and the same prompt gives the same output ids, in every process and after
every restart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
UNKNOWN, BEGIN, END = 0, 1, 2


def write_llama(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 8192,
) -> Path:
    """A Llama with multi-head attention. KV of one token is ``layers * 2 * kv_heads * (hidden / heads) * 2``
    bytes.

    ``kv_heads`` must be a multiple of the servers' tensor-parallel size.
    """
    return _write(
        directory,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
        },
        context,
    )


def write_deepseek(directory: Path, *, layers: int = 2, hidden: int = 64, heads: int = 4, context: int = 8192) -> Path:
    """A DeepseekV2 with multi-head latent attention (MLA) and dense layers only.

    KV of one token is ``layers * (32 + 16) * 2`` bytes, the same on every tensor-parallel rank.
    """
    return _write(
        directory,
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": 32,
            "num_hidden_layers": layers,
            "first_k_dense_replace": layers,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            # Without scaling SGLang picks a rotary kernel that has no CPU version.
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": context // 2,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "attention_bias": False,
        },
        context,
    )


def _write(directory: Path, config: dict[str, Any], context: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    shared = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }
    _dump(directory / "config.json", config | shared)
    _dump(directory / "generation_config.json", {"bos_token_id": BEGIN, "eos_token_id": END})
    _dump(directory / "tokenizer.json", _byte_level_tokenizer())
    _dump(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": context,
        },
    )
    return directory


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _byte_level_tokenizer() -> dict[str, Any]:
    """A ``tokenizer.json`` of one token a byte, in byte-level BPE's printable alphabet, and no merges."""
    names = ["<unk>", "<s>", "</s>", *sorted(_byte_alphabet())]
    names += [f"<extra_{number}>" for number in range(len(names), VOCABULARY)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, name in enumerate(names[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: number for number, name in enumerate(names)},
            "merges": [],
        },
    }


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE writes bytes with (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = 256 - len(printable)
    return [chr(code) for code in printable] + [chr(256 + number) for number in range(shifted)]
