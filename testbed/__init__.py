"""A real SGLang server with HiCache on a machine without a GPU, for tests and the demo. Not part of the
package.

``site/`` goes on a server's PYTHONPATH and stands in for what only a GPU machine has; ``models`` writes tiny
models; ``server`` runs servers; ``component`` drives SGLang's cache classes alone, without a server.
"""

from __future__ import annotations

from pathlib import Path

SITE = Path(__file__).resolve().parent / "site"
