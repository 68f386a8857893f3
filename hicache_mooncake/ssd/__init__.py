"""The SSD tier below a node's DRAM: stores (what lies where on disk) on top of disk I/O (how bytes get there)."""
