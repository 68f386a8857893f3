"""DeepseekV2, for multi-head latent attention."""

from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM as EntryClass

__all__ = ["EntryClass"]
