"""Build hook: compiles hicache_mooncake/native/copying.c where there is a C compiler; without one it is left out."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = runpy.run_path(str(Path(self.root, "hicache_mooncake", "native", "build.py")))
        reason = native["build"]()
        if reason:
            self.app.display_warning(f"copying is not compiled, small pages are copied slower: {reason}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append("hicache_mooncake/native/libcopying-*.so")
