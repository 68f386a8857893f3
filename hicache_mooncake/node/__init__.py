"""The node: one process per host that owns a segment of the pool and serves it to engines and to other nodes."""
