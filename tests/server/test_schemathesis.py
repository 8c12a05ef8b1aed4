"""What the OpenAPI document says and what the server does agree, over random requests to every route.

A longer run against any server, a thousand requests and more:

    export PYTHONPATH=.
    schemathesis --config-file tests/server/schemathesis.toml run http://127.0.0.1:8000/openapi.json --max-examples 40
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from engine.text.tokenizer import Tokenizer
from tests.server.conftest import listening

CONFIG = Path(__file__).with_name("schemathesis.toml")
ROOT = Path(__file__).parents[2]


def test_no_route_breaks_its_own_description(tokenizer: Tokenizer, tmp_path: Path):
    with listening(tokenizer, data_dir=str(tmp_path / "data")) as (url, _):
        command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(CONFIG), "run"]
        command += [f"{url}/openapi.json", "--max-examples", "4", "--seed", "1", "--no-color"]
        command += ["--phases", "examples,fuzzing", "--request-timeout", "60", "--generation-database", ":memory:"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None
    assert int(generated[1]) > 100
