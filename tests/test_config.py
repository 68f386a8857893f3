from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake import config, config_sources, config_values
from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.metadata.routes import link_to

SECRET = "hunter2"


def load(extra: dict[str, object] | None = None, **more: object) -> Settings:
    return Settings.load(extra, **{"env": {}, **more})  # type: ignore[arg-type]


def refused(extra: dict[str, object], **more: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(extra, **more)
    return caught.value


def test_defaults() -> None:
    settings = load()
    assert settings == Settings()
    assert (settings.pool, settings.segment_size, settings.protocol) == ("default", 4 << 30, "auto")
    assert (settings.op_timeout, settings.verify, settings.heartbeat) == (3.0, "always", 1.0)
    assert (settings.high_watermark, settings.staging_size) == (0.9, 64 << 20)
    assert settings.node_name


def test_defaults_are_what_their_parsers_accept() -> None:
    assert Settings.of({f.name: f.default for f in dataclasses.fields(Settings)}) == Settings()


@pytest.mark.parametrize("suffix", ["json", "toml", "yaml", "yml"])
def test_first_source_wins(tmp_path: Path, suffix: str) -> None:
    content = {
        "json": '{"pool": "file", "heartbeat": "500ms", "tenant": "file"}',
        "toml": 'pool = "file"\nheartbeat = 0.5\ntenant = "file"\n',
        "yaml": "pool: file\nheartbeat: 500ms\ntenant: file\n",
        "yml": "{pool: file, heartbeat: 0.5, tenant: file}",
    }
    file = tmp_path / f"settings.{suffix}"
    file.write_text(content[suffix])
    env = {"HICACHE_MOONCAKE_POOL": "env", "HICACHE_MOONCAKE_TENANT": "env", "HICACHE_MOONCAKE_SHARDS": "2"}
    for settings in (
        load({"pool": "extra"}, file=str(file), env=env),
        load({"pool": "extra"}, env={**env, "HICACHE_MOONCAKE_CONFIG": str(file)}),
    ):
        assert (settings.pool, settings.tenant, settings.heartbeat, settings.shards) == (
            "extra",
            "file",
            0.5,
            2,
        )
    assert load({"pool": None}, env=env).pool == "env"
    assert load(env={"HICACHE_MOONCAKE_POOL": ""}).pool == "default"


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_MOONCAKE_POOL", "mine")
    assert Settings.load().pool == "mine"


@pytest.mark.parametrize(
    ("content", "suffix", "match"),
    [
        ('{"secret": "hunter2",}', "json", r"not valid JSON \(line 1\)"),
        ("secret = hunter2", "toml", "not valid TOML"),
        ("a: [1\nsecret: hunter2: x", "yaml", "not valid YAML"),
        ("[1, 2]", "json", "one table"),
        ("pool = x", "ini", "a .json, .toml, .yaml or .yml file"),
        ("hunter2\xff", "toml", "not valid TOML"),
    ],
    ids=["json", "toml", "yaml", "list", "ini", "latin-1"],
)
def test_bad_files(tmp_path: Path, content: str, suffix: str, match: str) -> None:
    file = tmp_path / f"settings.{suffix}"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=match) as caught:
        load(file=str(file))
    assert SECRET not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(file=str(tmp_path / "none.json"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(file=str(tmp_path / "empty.yaml")) == Settings()


@pytest.mark.parametrize(
    ("given_name", "near"),
    [
        ("segmentsize", "segment_size"),
        ("redis", "redis_url"),
        ("tenant_ids", "tenant_id"),
        ("frobnicate", None),
    ],
)
def test_unknown_keys_name_the_nearest(given_name: str, near: str | None) -> None:
    error = refused({given_name: SECRET})
    assert error.field == given_name and SECRET not in str(error)
    assert (f"{near!r}" in error.hint) if near else ("docs/configuration.md" in error.hint)


def test_unknown_environment_names() -> None:
    error = refused({}, env={"HICACHE_MOONCAKE_REDIS_ULR": SECRET})
    assert "HICACHE_MOONCAKE_REDIS_URL" in error.hint and SECRET not in str(error)
    refused({}, env={"HICACHE_MOONCAKE_FROBNICATE": "1"})
    refused({}, env={"HICACHE_MOONCAKE_pool": "x"})
    service_links = {
        "HICACHE_MOONCAKE_SERVICE_HOST": "10.0.0.1",
        "HICACHE_MOONCAKE_SERVICE_PORT_DATA": "7070",
        "HICACHE_MOONCAKE_PORT": "tcp://10.0.0.1:7070",
        "HICACHE_MOONCAKE_PORT_7070_TCP_ADDR": "10.0.0.1",
        "HICACHE_MOONCAKE_NODE_SERVICE_HOST": "10.0.0.1",
        "MOONCAKE_MASTER": "10.0.0.1",
    }
    assert load(env=service_links) == Settings()


def test_keys_of_sglang_are_dropped() -> None:
    assert load(dict.fromkeys(config_sources.SGLANG_KEYS, "anything")) == Settings()


def test_upstream_names_are_mapped() -> None:
    settings = load({"global_segment_size": "2gb", "tenant_id": "team", "protocol": "tcp", "device_name": "mlx5_0"})
    assert (settings.segment_size, settings.tenant, settings.device_name) == (2 << 30, "team", "mlx5_0")
    for both in ({"global_segment_size": 1, "segment_size": 2}, {"segment_size": 2, "global_segment_size": 1}):
        error = refused(both)
        assert (error.field, error.allowed.split(",")[0]) == (
            "global_segment_size",
            "it is another name of 'segment_size'",
        )


@pytest.mark.parametrize(
    ("upstream", "ours"),
    [
        ("master_server_address", "redis_url"),
        ("metadata_server", "redis_url"),
        ("client_server_address", "node"),
        ("local_hostname", "advertise"),
        ("master_metrics_port", "redis_url"),
        ("check_server", "node"),
        ("standalone_storage", "node"),
        ("enable_group_semantics", "high_watermark"),
    ],
)
def test_upstream_keys_without_a_meaning_name_ours(upstream: str, ours: str) -> None:
    error = refused({upstream: True})
    assert error.field == upstream and f"{ours!r}" in error.hint
    assert ours in {f.name for f in dataclasses.fields(Settings)}


@pytest.mark.parametrize("inert", ["check_server", "standalone_storage", "enable_group_semantics"])
def test_upstream_switches_that_are_off_ask_for_nothing(inert: str) -> None:
    assert load({inert: False}) == Settings()


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (0, 0),
        (7, 7),
        (2.0, 2),
        ("4gb", 4 << 30),
        ("512MiB", 512 << 20),
        ("1.5 kb", 1536),
        ("2T", 2 << 40),
        ("9 b", 9),
    ],
)
def test_sizes(raw: object, size: int) -> None:
    assert config_values.size(raw) == size


@pytest.mark.parametrize(("raw", "taken"), [(0, True), (1, False), ("4095", False), ("4k", True)])
def test_a_segment_that_could_hold_nothing_is_refused(raw: object, taken: bool) -> None:
    if taken:
        load({"segment_size": raw})
    else:
        assert "at least 4096 bytes" in refused({"segment_size": raw}).allowed


@pytest.mark.parametrize("raw", [-1, "-1", "4 apples", "", "gb", True, 1.5, float("nan"), [], "1e9", "٣", {}])
def test_not_sizes(raw: object) -> None:
    assert "size is expected" in refused({"segment_size": raw}).allowed


@hypothesis.settings(deadline=None)
@given(st.integers(0, 1 << 50), st.sampled_from(["", "k", "KB", "MiB", "g", "tb"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[unit[:1].lower()]
    assert config_values.size(f"{number}{unit}") == number * 1024**power


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [(1, 1.0), (0.25, 0.25), ("5s", 5.0), ("500ms", 0.5), ("2m", 120.0), ("2 min", 120.0), ("7", 7.0)],
)
def test_durations(raw: object, seconds: float) -> None:
    assert load({"heartbeat": raw}).heartbeat == seconds


@pytest.mark.parametrize("raw", [-1, 0, "0s", "1d", "", True, float("inf"), float("nan"), 1e9, []])
def test_not_durations(raw: object) -> None:
    assert refused({"heartbeat": raw}).field == "heartbeat"


@pytest.mark.parametrize(("raw", "flag"), [("false", False), ("off", False), (0, False), (False, False), ("No", False)])
def test_flags(raw: object, flag: bool) -> None:
    assert load({"enable_ssd_offload": raw}).enable_ssd_offload is flag


@hypothesis.settings(deadline=None)
@given(
    st.sampled_from([f.name for f in dataclasses.fields(Settings)]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=3,
    ),
)
def test_any_value_is_accepted_or_refused_by_name(name: str, raw: object) -> None:
    try:
        loaded = load({name: raw})
    except ConfigError as error:
        assert name == error.field
    else:
        assert Settings.of(loaded.explicit()) == loaded
        assert repr(loaded)


@pytest.mark.parametrize(
    "extra",
    [
        {"protocol": "nvlink"},
        {"verify": "never"},
        {"huge_pages": "maybe"},
        {"pool": "a:b"},
        {"pool": ""},
        {"tenant": "a b"},
        {"name": "{0}"},
        {"shards": -1},
        {"shards": "1.5"},
        {"staging_size": 4096},
        {"high_watermark": 1.5},
        {"high_watermark": 0},
        {"copy_threads": -1},
        {"op_timeout": 0},
        {"node": "relative.sock"},
        {"node": "@"},
        {"node": "/" + "x" * 107},
        {"secret_file": "relative"},
        {"extra_backend_tag": "two\nlines"},
        {"listen": "tcp://a:1"},
        {"listen": "a"},
        {"listen": "a:70000"},
        {"listen": "[::1]"},
        {"listen": "::1:80"},
        {"listen": ":80"},
        {"advertise": "a b"},
        {"advertise": "host:"},
        {"redis_url": "http://a"},
        {"redis_url": "localhost:6379"},
        {"redis_url": "redis://"},
        {"redis_url": "redis://h:0"},
        {"redis_url": "redis://h/zero"},
        {"redis_url": "redis://h?db=x"},
        {"redis_url": "redis://h/0?foo=bar"},
        {"redis_url": "redis://h?ssl_ca_certs=/ca.pem"},
        {"redis_url": "redis://h1,h2"},
        {"redis_url": "redis+cluster://h1,,h2"},
        {"redis_url": "redis+cluster://h/1"},
        {"redis_url": "redis+cluster://h?db=1"},
        {"redis_url": "redis+sentinel://h"},
        {"redis_url": "redis+sentinel://h/main/x"},
        {"redis_url": "redis+other://h"},
        {"redis_url": "unix+cluster:///s"},
        {"redis_url": "redis://h?password_file=relative"},
        {"redis_url": "redis://h?sentinel_password=x"},
        {"redis_url": "unix://"},
        {"redis_url": 6379},
        {"ssd_path": "relative/ssd"},
        {"ssd_size": "1gb"},
        {"ssd_store": "offset"},
        {"offload": "sometimes"},
        {"ssd_io": "dma"},
        {"ssd_low_watermark": 0.99},
    ],
)
def test_refused_values(extra: dict[str, object]) -> None:
    (name,) = extra
    assert refused(extra).field == name


@pytest.mark.parametrize(
    "extra",
    [
        {"node": "@hicache"},
        {"node": "/run/hicache.sock"},
        {"listen": "[::]:0"},
        {"listen": "0.0.0.0:7070"},
        {"advertise": "node7.rack2"},
        {"advertise": "[fe80::1]"},
        {"advertise": "10.0.0.1:7070"},
        {"redis_url": "redis://cache:p%40ss@db.example:6379/3"},
        {"redis_url": "redis://[::1]"},
        {"redis_url": "rediss://db.example?ssl_ca_certs=/etc/ca.pem"},
        {"redis_url": "unix:///run/redis.sock?db=2"},
        {"redis_url": "redis://cache@h/3?password_file=/run/secrets/redis"},
        {"redis_url": "redis+cluster://h1:7000,h2,[::1]:7001"},
        {"redis_url": "rediss+sentinel://u:p@s1,s2:26380/main/2?sentinel_password=x&ssl_ca_certs=/ca"},
        {"huge_pages": "on"},
        {"offload": "off"},
        {"ssd_path": "/ssd"},
    ],
)
def test_accepted_values(extra: dict[str, object]) -> None:
    (name,) = extra
    assert getattr(load(extra), name) == extra[name]


def test_parameters_of_a_redis_url_are_known_ones() -> None:
    assert "the parameter 'foo' after the ?" in refused({"redis_url": "redis://h/0?foo=bar"}).allowed
    assert SECRET not in str(refused({"redis_url": f"redis://user:12?{SECRET}=x@h"}))
    for scheme, names in (
        ("redis", config_values._URL_PARAMETERS),
        ("rediss", config_values._URL_PARAMETERS | config_values._TLS_PARAMETERS),
        ("rediss+cluster", (config_values._URL_PARAMETERS | config_values._TLS_PARAMETERS) - {"db"}),
        ("redis+sentinel", config_values._URL_PARAMETERS | config_values._SENTINEL_PARAMETERS),
    ):
        for name in names:
            value = {
                "ssl_check_hostname": "true",
                "ssl_cert_reqs": "none",
                "ssl_min_version": "771",
                "password_file": "/f",
                "sentinel_password_file": "/f",
            }.get(name, "1")
            place = "h/main" if "sentinel" in scheme else "h"
            url = load({"redis_url": f"{scheme}://{place}?{name}={value}"}).redis_url
            link_to(url, timeout=1, client_name="t").close()


def test_yaml_booleans_are_words_where_words_are_expected(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("huge_pages: off\noffload: off\n")
    settings = load(file=str(file))
    assert (settings.huge_pages, settings.offload) == ("off", "off")


def test_ssd_settings_are_inert_when_it_is_said_to_be_off() -> None:
    settings = load({"enable_ssd_offload": False, "ssd_offload_path": "/ssd", "ssd_size": "1gb"})
    assert settings == Settings()


def test_the_ssd_tier_is_on_where_it_has_a_place() -> None:
    assert load({"ssd_offload_path": "/ssd", "ssd_size": "1gb"}).enable_ssd_offload
    assert refused({"enable_ssd_offload": True}).field == "ssd_path"
    assert not Settings().enable_ssd_offload


def test_settings_that_contradict_each_other() -> None:
    assert refused({"secret": SECRET, "secret_file": "/s"}).field == "secret_file"


@pytest.mark.parametrize(
    "url",
    [
        "redis://cache:hunter2@h:6379/0",
        "redis://:hunter2@h",
        "redis://hunter2@h",
        "redis://cache:hunter2@x@h",
        "redis://cache:hunter2/x@h",
        "redis://cache:hunter2?x@h",
        "unix://u:hunter2@/run/redis.sock",
        "unix:///run/redis.sock?db=1&password=hunter2",
        "unix:///run/redis.sock?PASSWORD=hunter2&db=1",
        "rediss://h?ssl_password=hunter2",
        "hunter2",
    ],
)
def test_no_password_of_a_url_is_shown(url: str) -> None:
    assert SECRET not in config_values.masked_url(url)
    try:
        settings = load({"redis_url": url})
    except ConfigError as error:
        assert SECRET not in str(error) and SECRET not in repr(error.value)
    else:
        assert SECRET not in repr(settings) + str(settings) + json.dumps(settings.public())


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    settings = load({"secret": SECRET, "pool": "seen"})
    assert SECRET not in repr(settings) + str(settings) + json.dumps(settings.public()) + f"{settings}"
    assert "pool='seen'" in repr(settings) and "secret='***'" in repr(settings)
    assert settings.explicit() == {"secret": SECRET, "pool": "seen"}
    for raw in ([SECRET], {"a": SECRET}, SECRET + "\n"):
        assert SECRET not in str(refused({"secret": raw}))
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    settings = load({"secret_file": str(file)})
    assert settings.shared_secret() == SECRET.encode()
    assert SECRET not in repr(settings)


def test_the_shared_secret(tmp_path: Path) -> None:
    assert load().shared_secret() == b""
    assert load({"secret": "sés ame"}).shared_secret() == "sés ame".encode()
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        load({"secret_file": str(file)}).shared_secret()
    file.write_bytes(b"\r\n")
    with pytest.raises(ConfigError, match="empty"):
        load({"secret_file": str(file)}).shared_secret()
    file.write_bytes(b" \x00\xff \r\n")
    assert load({"secret_file": str(file)}).shared_secret() == b" \x00\xff "


def test_the_node_is_named_after_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({"name": "n7"}).node_name == "n7"
    for host, expected in (
        ("web_1.rack", "web_1.rack"),
        ("-ä b", "b"),
        ("...", "node"),
        ("x" * 80, "x" * 64),
    ):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        name = load().node_name
        assert name == expected and config_values.name(name)


def test_the_reference_is_current() -> None:
    root = Path(config.__file__).parents[1]
    printed = subprocess.run(
        [sys.executable, "-m", "hicache_mooncake.config"],
        cwd=root,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert printed.stderr == b""
    assert (root / "docs" / "configuration.md").read_bytes() == printed.stdout, (
        "run: python -m hicache_mooncake.config > docs/configuration.md"
    )
    for field in dataclasses.fields(Settings):
        assert f"\n| `{field.name}` |".encode() in printed.stdout
        assert field.metadata["by"] in ("node", "engine", "both")
