"""One definition for flag, environment and file: precedence, and errors that say what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import config
from engine.config import OPTIONS, EngineConfig, Settings, memory
from engine.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.toml"))


def load(*flags: str, env: dict[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    config.add_options(parser, tuple(config.GROUPS), everything=True)
    return config.load(parser.parse_args(flags), env or {})


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "port = 1\nblock-size = 2\nmax_waiting = 3\n")
    env = {"OCTAVO_PORT": "10", "OCTAVO_BLOCK_SIZE": "20", "OCTAVO_CONFIG": file}
    s = load("--port", "100", env=env)
    assert (s.server.port, s.engine.kv.block_size, s.engine.schedule.max_waiting) == (100, 20, 3)
    assert s.engine.schedule.max_num_seqs == config.ScheduleConfig().max_num_seqs
    places = [s.sources[n] for n in ("port", "block_size", "max_waiting", "max_num_seqs")]
    assert places == ["flag", "environment", file, "default"]


def test_tables_of_a_file_are_the_groups_of_the_settings(tmp_path: Path) -> None:
    file = written(
        tmp_path, '[model]\nmodel = "m"\nmax-model-len = 512\n[server]\napi-key = ["a", "b"]\nauth = false\n'
    )
    s = load("--config", file)
    assert (s.engine.model.model, s.engine.model.max_model_len) == ("m", 512)
    assert (s.server.api_key, s.server.auth) == (("a", "b"), False)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "x"], "--port x: must be a whole number from 0 to 65535"),
        (["--block-size", "0"], "--block-size 0: must be a whole number from 1 to 4096"),
        (["--kv-memory", "two"], "--kv-memory two: must be a size such as 512MiB or 2GiB"),
        (["--dtype", "bfloat61"], "did you mean bfloat16?"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1: must be a number of at least 0"),
        (["--shutdown-timeout", "nan"], "must be a number"),
        (["--host", "0.0.0.0"], "without a key"),
        (["--ssl-certfile", "a.pem"], "--ssl-keyfile"),
        (["--preemption", "swap", "--swap-space", "0"], "--swap-space"),
        (["--config", "/nowhere.toml"], "can't be read"),
    ],
)
def test_a_bad_value_names_itself_its_limits_and_what_to_do(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(*flags)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-modle-len = 5", "did you mean max-model-len?"),
        ("[kv]\nblok-size = 4", "did you mean block-size?"),
        ("[kv]\nport = 4", "belongs under [server]"),
        ("[sever]\nport = 4", "did you mean server?"),
        ("port = 4.5", "must be a whole number"),
        ("port = true", "must be a whole number"),
        ('auth = "perhaps"', "must be true or false"),
        ("api-key = [1]", "must be a list of non-empty texts"),
        ("port = ", "no valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_nearest_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r".") as error:
        load("--config", written(tmp_path, text))
    assert says in str(error.value)


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="OCTAVO_PROT: no such setting; did you mean port"):
        load(env={"OCTAVO_PROT": "1"})


def test_other_machines_need_a_key_unless_that_is_waived(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    for flags in (["--api-key", "k"], ["--no-auth"], ["--api-key-file", str(keys)]):
        assert load("--host", "0.0.0.0", *flags).server.host == "0.0.0.0"
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert load("--host", host).server.host == host


def test_keys_are_never_in_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        load(env={"OCTAVO_API_KEY": "secret,,"})
    assert "secret" not in str(error.value)


def test_the_engine_configuration_crosses_as_msgpack() -> None:
    sent = EngineConfig.of("m", num_kv_blocks=7, dtype="float32")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineConfig) == sent


def test_offline_keywords_are_checked_like_flags() -> None:
    with pytest.raises(ConfigError, match="did you mean num-kv-blocks"):
        EngineConfig.of("m", num_kv_block=7)
    with pytest.raises(ConfigError, match="no such setting"):
        EngineConfig.of("m", port=1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("2GiB", 2**31), ("1.5 g", 3 << 29), ("64MiB", 1 << 26), ("30%", 300), ("100%", 1000)],
)
def test_sizes(text: str, size: int) -> None:
    assert memory(text, 1000) == size


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_profile_loads(path: Path) -> None:
    s = load("--config", str(path))
    given = [name for table in tomllib.loads(path.read_text()).values() for name in table]
    assert given
    assert all(s.sources[name.replace("-", "_")] == str(path) for name in given)


def test_there_are_few_settings_and_each_has_a_help() -> None:
    assert len(OPTIONS) <= 64
    assert all(o.help or o.choices for o in OPTIONS.values())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


KINDS = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "tuple[str, ...]": tuple,
    "int | None": (int, type(None)),
}


def outcome(call, *arguments: object) -> object:
    """What a call gives, or the error that it refuses with."""
    try:
        return call(*arguments)
    except ConfigError as error:
        return error


@given(st.sampled_from(sorted(OPTIONS)), VALUES)
def test_any_value_is_taken_with_its_type_or_refused_in_one_line(name: str, value: object) -> None:
    parsed = outcome(OPTIONS[name].parse, value, name)
    if isinstance(parsed, ConfigError):
        assert str(parsed).startswith(name)
        assert "\n" not in str(parsed)
    else:
        assert isinstance(parsed, KINDS[OPTIONS[name].kind])


@given(st.binary(max_size=200))
def test_any_bytes_as_a_file_are_taken_or_refused(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        found = outcome(config.from_file, file.name)
    assert isinstance(found, list) or file.name in str(found)


def test_what_config_show_prints_is_a_file_that_gives_the_same_settings(tmp_path: Path, capsys) -> None:
    from server.cli import main

    assert main(["config", "show", "m", "--port", "9", "--no-auth", "--cors-origin", "*", "--max-model-len", "99"]) == 0
    again = load("--config", written(tmp_path, capsys.readouterr().out))
    assert again.server == dataclasses.replace(config.ServerConfig(), port=9, auth=False, cors_origin=("*",))
    assert again.engine.model == config.ModelConfig(model="m", max_model_len=99)


def test_config_show_as_json_says_where_each_value_came_from(capsys, monkeypatch) -> None:
    from server.cli import main

    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "7")
    assert main(["config", "show", "--api-key", "sesame", "--json"]) == 0
    out = capsys.readouterr().out
    rows = json.loads(out)
    assert rows["max_num_seqs"] == {"value": 7, "source": "environment", "group": "schedule"}
    assert rows["api_key"]["value"] == ["***"]
    assert "sesame" not in out
