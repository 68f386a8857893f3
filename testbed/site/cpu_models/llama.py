"""Llama, for multi-head attention."""

from sglang.srt.models.llama import LlamaForCausalLM as EntryClass

__all__ = ["EntryClass"]
