"""Pages moved from node to node: one small interface, one module a transport."""

from __future__ import annotations

from .base import Credentials, Listener, Outcome, PageRead, PageSource, Peer, PinnedPage, Transport

__all__ = ["Credentials", "Listener", "Outcome", "PageRead", "PageSource", "Peer", "PinnedPage", "Transport"]
