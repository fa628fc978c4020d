"""Models by repository: from the hub's cache, from a hub over HTTP, and when there is neither."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from nbtrain.catalog import Catalog
from nbtrain.catalog.repositories import is_repository, split_location
from nbtrain.errors import NotFound, Refused
from nbtrain.plan.resolved import BaseModelRef
from nbtrain.store import open_store
from nbtrain.training.prepare_model import is_ready, prepare, weights_folder

COMMIT = "c" * 40
CONFIG = json.dumps(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
    }
).encode()
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "generation_config.json": b'{"eos_token_id": 2}',
    "model.safetensors": save({"a": np.zeros(6)}),
}
WEIGHTS = hashlib.sha256(FILES["model.safetensors"]).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def put(cache: Path, files: dict[str, bytes], commit: str = COMMIT) -> None:
    """Lay files out as the hub's cache does: blobs, and a snapshot of links to them."""
    root = cache / "models--owner--name"
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (root / part).mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, content in files.items():
        big = name.endswith(".safetensors")
        digest = (hashlib.sha256 if big else hashlib.sha1)(content).hexdigest()
        (root / "blobs" / digest).write_bytes(content)
        (root / "snapshots" / commit / name).symlink_to(f"../../blobs/{digest}")


def as_ref(model: object) -> BaseModelRef:
    return BaseModelRef(*(getattr(model, name) for name in BaseModelRef.__slots__))


def test_a_cached_repository(home: Path, cache: Path, tmp_path: Path) -> None:
    put(cache, FILES)
    model = Catalog(open_store(home)).base_model("owner/name")
    assert (model.slug, model.kind) == ("owner/name", "repository")
    assert model.location == f"owner/name@{COMMIT}"  # the commit, whatever main becomes
    assert (model.max_context, model.parameters, model.precision) == (256, 6, "bf16")
    folder = weights_folder(as_ref(model), home)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    # A copy of the files in a folder is the same model.
    for name, content in FILES.items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(content)
    copy = Catalog(open_store(home)).base_model(str(tmp_path / "copy"))
    assert copy.fingerprint == model.fingerprint


def test_a_selected_repository_stays_at_its_commit(home: Path, cache: Path) -> None:
    put(cache, FILES)
    catalog = Catalog(open_store(home))
    chosen = catalog.select_base_model("owner/name", "mine")
    put(cache, FILES | {"config.json": CONFIG + b" "}, "d" * 40)
    assert catalog.base_model("mine") == chosen
    assert catalog.base_model("owner/name").location == f"owner/name@{'d' * 40}"
    assert catalog.base_model(f"owner/name@{COMMIT}").fingerprint == chosen.fingerprint


def test_a_cached_model_that_cannot_be_trained_is_refused(home: Path, cache: Path) -> None:
    config = json.loads(CONFIG) | {"is_encoder_decoder": True}
    put(cache, FILES | {"config.json": json.dumps(config).encode()})
    with pytest.raises(Refused, match="encoder-decoder"):
        Catalog(open_store(home)).base_model("owner/name")


def test_offline_says_whether_it_is_absent_or_incomplete(
    home: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    catalog = Catalog(open_store(home))
    with pytest.raises(NotFound, match="not in the local cache, and HF_HUB_OFFLINE is set"):
        catalog.base_model("owner/name")
    put(cache, {"config.json": CONFIG, "tokenizer.json": b"{}"})
    with pytest.raises(NotFound, match="cached without all its weights"):
        catalog.base_model("owner/name")
    (tmp_path / "some" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match=r"a folder is written \./some/folder"):
        catalog.base_model("some/folder")


def test_an_unfinished_download_is_not_ready(home: Path, cache: Path) -> None:
    put(cache, FILES)
    model = as_ref(Catalog(open_store(home)).base_model("owner/name"))
    assert is_ready(model, home)
    (cache / "models--owner--name/snapshots" / COMMIT / "model.safetensors").unlink()
    assert not is_ready(model, home)
    with pytest.raises(NotFound, match="cannot be downloaded whole: no network"):
        prepare(model, home)
    put(cache, {"model.safetensors": FILES["model.safetensors"]}, "e" * 40)
    weights = replace(model, location=f"owner/name@{'e' * 40}")
    put(cache, {"config.json": CONFIG}, "e" * 40)
    assert not is_ready(weights, home)  # without a tokenizer
    put(cache, {"tokenizer.json": b"{}"}, "e" * 40)
    assert is_ready(weights, home)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", True),
        ("owner/na-me_1.5@refs/pr/3", True),
        ("name", False),
        ("a/b/c", False),
        ("/owner/name", False),
        ("owner/../name", False),
        ("owner/name@", False),
    ],
)
def test_how_a_repository_is_written(text: str, expected: bool) -> None:
    assert is_repository(text) is expected
    assert split_location("a/b@c/d") == ("a/b", "c/d")
    assert split_location("a/b") == ("a/b", None)


# --- a hub over HTTP


class Hub(BaseHTTPRequestHandler):
    """The two routes of the hub that plan time and preparation use."""

    asked: list[str]

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        name = self.path.split("?")[0].split("/")[-1]
        if self.path.startswith(("/api/models/owner/name/tree", "/api/models/owner/name/revision")):
            self.send(self.tree() if "/tree/" in self.path else self.info(), body)
        elif self.path.startswith("/api/models/owner/name"):
            self.send(self.info(), body)
        elif self.path.startswith(f"/owner/name/resolve/{COMMIT}/") and name in FILES:
            if body:
                self.asked.append(name)
            self.send(FILES[name], body, etag=hashlib.sha256(FILES[name]).hexdigest())
        else:
            self.send(b"{}", body, status=404, error="RepoNotFound")

    def info(self) -> bytes:
        siblings = [self.entry("rfilename", name) for name in FILES]
        return json.dumps(
            {"id": "owner/name", "sha": COMMIT, "siblings": siblings, "tags": [],
             "safetensors": {"parameters": {"F64": 6}, "total": 6}}
        ).encode()  # fmt: skip

    def tree(self) -> bytes:
        entries = [self.entry("path", name) | {"type": "file"} for name in FILES]
        return json.dumps(entries).encode()

    def entry(self, key: str, name: str) -> dict[str, object]:
        size = len(FILES[name])
        sha1 = hashlib.sha1(FILES[name]).hexdigest()
        entry: dict[str, object] = {key: name, "size": size, "blobId": sha1, "oid": sha1}
        if name.endswith(".safetensors"):
            sha = {"sha256": WEIGHTS, "oid": WEIGHTS, "size": size, "pointerSize": 130}
            entry["lfs"] = sha
        return entry

    def send(
        self, content: bytes, body: bool, *, status: int = 200, etag: str = "", error: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(home: Path, tmp_path: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Environment of a process that reaches our hub, and the files it was asked for."""
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    yield environment, Hub.asked
    server.shutdown()
    server.server_close()


def python(code: str, environment: dict[str, str]) -> str:
    head = (
        "from nbtrain.catalog import Catalog\nfrom nbtrain.store import open_store\n"
        "from nbtrain.errors import NotFound\nstore = open_store(); catalog = Catalog(store)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_fetches_small_files_alone_and_preparing_the_rest(
    hub: tuple[dict[str, str], list[str]],
) -> None:
    environment, asked = hub
    ask = "m = catalog.base_model('owner/name'); print(m.fingerprint, m.location, m.parameters)\n"
    before = python(ask, environment).split()
    assert before[1:] == [f"owner/name@{COMMIT}", "6"]
    assert asked == ["config.json", "tokenizer.json", "generation_config.json"]
    code = ask + (
        "from nbtrain.training.prepare_model import prepare, is_ready\n"
        "from nbtrain.plan.resolved import BaseModelRef\n"
        "ref = BaseModelRef(*(getattr(m, n) for n in BaseModelRef.__slots__))\n"
        "assert not is_ready(ref, store.home)\n"
        "prepare(ref, store.home); prepare(ref, store.home)\n"
        "assert is_ready(ref, store.home)\n"
        "print(catalog.base_model('owner/name').fingerprint)"
    )
    after = python(code, environment).split()
    assert sorted(asked) == sorted(FILES)
    assert after[-1] == before[0]  # the same model before and after the download


def test_a_repository_that_the_hub_does_not_know(hub: tuple[dict[str, str], list[str]]) -> None:
    code = "try: catalog.base_model('owner/nothing')\nexcept NotFound as e: print(e)"
    assert "there is no repository 'owner/nothing'" in python(code, hub[0])


def test_a_hub_that_cannot_be_reached(home: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path),
    }
    code = "try: catalog.base_model('owner/name')\nexcept NotFound as e: print(e)"
    assert "not in the local cache, and the hub cannot be reached" in python(code, environment)
