"""What SGLang and its operator are told when this package is loaded and attached."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake import plugin
from hicache_mooncake.engine import advice, identity
from tests.backend.rig import Rig
from tests.pool import NodeProcess


def test_loading_the_plugin_imports_nothing_else_that_could_fail() -> None:
    listing = (
        "import sys, hicache_mooncake.plugin; print([n for n in sys.modules if n.startswith('hicache_mooncake.')])"
    )
    command = [sys.executable, "-c", listing]
    text = subprocess.check_output(command, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert text.strip() == "['hicache_mooncake.plugin']"


@pytest.mark.parametrize("broken", ["hook registry", "weights"])
def test_a_hook_that_fails_is_said_and_the_backend_is_registered(
    broken: str, sglang: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered: list[str] = []

    def register(target: str, *_: Any, **__: Any) -> None:
        if broken == "hook registry":
            raise TypeError("register() takes no such argument")
        registered.append(target)

    monkeypatch.setattr(HookRegistry, "register", register)
    if broken == "weights":
        monkeypatch.setitem(sys.modules, "hicache_mooncake.engine.weights", None)
        monkeypatch.delattr("hicache_mooncake.engine.weights")
    monkeypatch.setattr(StorageBackendFactory, "_registry", {"mooncake": {"module_path": "sglang's own"}})
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert StorageBackendFactory._registry["mooncake"]["module_path"] == "hicache_mooncake.backend"
    errors = [record.getMessage() for record in caplog.records if record.name == plugin.__name__]
    if broken == "hook registry":
        assert len(errors) == 2 and all("takes no such argument" in error for error in errors), errors
    else:
        assert len(errors) == 1 and "weights" in errors[0] and len(registered) == 1, errors


def test_an_error_in_the_backend_is_told_as_it_is(sglang: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    monkeypatch.setattr(plugin, "MODULE", "hicache_mooncake.no_such_module")
    monkeypatch.setattr(StorageBackendFactory, "_registry", dict(StorageBackendFactory._registry))
    plugin.register()
    with pytest.raises(ImportError, match="no_such_module"):
        StorageBackendFactory.create_backend("mooncake", None, None)


@pytest.mark.parametrize(
    ("extra", "shown", "names"),
    [
        ({"secret": "hunter2"}, '{"secret": "hunter2"}', ["secret"]),
        ({"secret": "hunter2"}, "", ["secret"]),  # attached over HTTP: published after it worked
        ({"secret": "hunter2"}, "@/etc/l3.yaml", []),
        ({"secret_file": "/etc/secret", "redis_url": "redis://cache:6379"}, "{}", []),
        ({"redis_url": "redis://:hunter2@cache:6379", "secret": "hunter2"}, "{}", ["secret", "redis_url"]),
        ({"redis_url": "unix:///run/redis.sock?password=hunter2"}, "{}", ["redis_url"]),
        (None, "", []),
    ],
)
def test_which_secrets_are_exposed(extra: dict[str, object] | None, shown: str, names: list[str]) -> None:
    assert advice.exposed(extra, shown) == names


@pytest.mark.parametrize("shown", ["inline", "@/etc/l3.yaml"])
def test_attaching_warns_of_an_exposed_secret_and_of_settings_without_effect(
    shown: str, rig: Rig, node: NodeProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published = identity.published
    monkeypatch.setattr(advice, "published", lambda name: shown if "extra_config" in name else published(name))
    extra = {"secret": "hunter2", "segment_size": "1gb", "redis_url": "redis://:hunter2@elsewhere:6379/0"}
    with caplog.at_level(logging.INFO):
        rig.backend(extra=extra)
    warnings = [record.getMessage() for record in caplog.records if record.name == advice.__name__]
    exposed = [text for text in warnings if "EXPOSED" in text]
    assert len(exposed) == (shown == "inline") and all("secret and redis_url" in text for text in exposed)
    (ignored,) = [text for text in warnings if "no effect" in text]
    assert node.node_id in ignored and "secret is not set there" in ignored
    assert f"segment_size is {256 << 20} there, {1 << 30} here" in ignored
    assert f"redis_url is {node.redis_url} there, redis://:***@elsewhere:6379/0 here" in ignored
    assert "hunter2" not in caplog.text


def test_attaching_with_the_nodes_own_settings_warns_of_nothing(
    rig: Rig, node: NodeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    rig.backend(extra={"segment_size": "256MiB", "redis_url": node.redis_url, "op_timeout": 2, "tenant": "t"})
    rig.backend()
    assert not [record for record in caplog.records if record.name == advice.__name__]


def test_the_same_secret_is_told_from_another(redis_url: str, sglang: None, tmp_path: Path) -> None:
    from hicache_mooncake.config import Settings
    from hicache_mooncake.protocol import messages as m

    (tmp_path / "secret").write_text("hunter2\n")
    welcome = m.Welcome("n~1", b"s" * 16, "0", "", settings={}, proof=m.secret_proof(b"hunter2", b"s" * 16))
    assert advice.without_effect(Settings.of({"secret": "hunter2"}), welcome) == []
    assert advice.without_effect(Settings.of({"secret_file": str(tmp_path / "secret")}), welcome) == []
    assert advice.without_effect(Settings.of({"secret": "other"}), welcome) == ["secret is another there"]
    gone = Settings.of({"secret_file": str(tmp_path / "gone")})
    assert advice.without_effect(gone, welcome) == ["secret_file is another there"]
