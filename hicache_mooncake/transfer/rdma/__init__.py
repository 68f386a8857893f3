"""Pages moved by one-sided RDMA: the reader's device takes them straight out of the owner's segment.

Nothing here loads libibverbs on import; :class:`~.transport.RdmaTransport` does.
"""
