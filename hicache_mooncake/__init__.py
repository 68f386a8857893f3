"""A distributed L3 KV cache for SGLang HiCache: every host's node owns a DRAM segment, all nodes form one pool."""

__version__ = "0.1.0"
