"""Tokens per GB by model shape: the arithmetic, and the table in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.cli import main
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.operate.capacity import plan, shape_of

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA_8B,
    "Llama-3.1-70B": {
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
    },
    "Qwen3-32B": {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    "Qwen3-235B-A22B": {"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
    "DeepSeek-V3": DEEPSEEK_V3,
}


def test_bytes_of_a_token() -> None:
    assert shape_of(LLAMA_8B).token_bytes("bfloat16") == 128 * 1024
    assert shape_of(LLAMA_8B).token_bytes("fp8_e4m3") == 64 * 1024
    assert shape_of(DEEPSEEK_V3).token_bytes("bfloat16") == 61 * 576 * 2
    assert shape_of({"text_config": LLAMA_8B, "vision_config": {}}) == shape_of(LLAMA_8B)


def test_a_plan_counts_whole_granules_to_the_watermark() -> None:
    found = plan(shape_of(LLAMA_8B), "bfloat16", 64, 100 << 30, watermark=0.9)
    assert found.page_bytes == 8 << 20
    assert found.pages == int((100 << 30) * 0.9) // (8 << 20)
    assert found.tokens == found.pages * 64
    odd = plan(shape_of(DEEPSEEK_V3), "bfloat16", 1, 1 << 30, watermark=1.0)
    assert odd.pages == (1 << 30) // (18 * 4096)  # 70,272 bytes take 18 granules


@pytest.mark.parametrize(
    "config",
    [{}, {"num_hidden_layers": "many"}, {**LLAMA_8B, "num_attention_heads": 0}, {**LLAMA_8B, "mamba_d_state": 128}],
)
def test_what_it_cannot_tell_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        shape_of({"num_key_value_heads": None, **config} if config.get("num_attention_heads") == 0 else config)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        shape_of(LLAMA_8B).token_bytes("int3")


def test_the_table_in_the_docs_is_what_is_computed() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "capacity.md").read_text()
    rows = {row[0]: row[1:] for row in re.findall(r"^\| ([\w.-]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)}
    assert set(rows) == set(SHAPES)
    for name, (per_token, bf16, fp8) in rows.items():
        shape = shape_of(SHAPES[name])
        assert int(per_token.replace(",", "")) == shape.token_bytes("bfloat16")
        for told, dtype in ((bf16, "bfloat16"), (fp8, "fp8_e4m3")):
            found = plan(shape, dtype, 64, 100 * 10**9, watermark=0.9)
            assert int(told.replace(",", "")) == round(found.tokens / 100, -2)


def test_the_command_prints_what_the_docs_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(__file__).parents[2].joinpath("docs", "capacity.md").read_text()
    command, shown = re.findall(r"```console\n\$ hicache-mooncake (.*?)\n(.*?)```", text, re.S)[0]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main([word.replace("config.json", str(tmp_path / "config.json")) for word in command.split()]) == 0
    assert capsys.readouterr().out == shown
    assert main(["capacity", str(tmp_path), "--json", "--tp", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["token_bytes"] == 128 * 1024


@pytest.mark.parametrize(
    ("content", "size", "named"), [("{}", "1gb", "config.json"), ("no", "1gb", "CONFIG"), ("{}", "much", "--size")]
)
def test_the_command_refuses_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, size: str, named: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["capacity", str(tmp_path), "--size", size]) == 2
    assert named in capsys.readouterr().err
