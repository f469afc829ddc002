"""The file of the user's own text: what it holds, its bounds, who may read it, and several processes at once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client import user_text_file
from edge_client.user_text import UserText
from edge_client.user_text_file import UserTextFile
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


class Bytes:
    """A tokenizer whose ids are bytes, and one more for the sign of a broken character."""

    def encode(self, text: str) -> list[int]:
        return [token for sign in text for token in ([256] if sign == "\ufffd" else sign.encode())]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class Headed(Bytes):
    """One that puts an id before each text, as some put a space: a part takes more ids than it did in the whole."""

    def encode(self, text: str) -> list[int]:
        return [257, *super().encode(text)] if text else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "user.text"


def add(path: Path, *texts: str, max_tokens: int = 1000) -> None:
    UserTextFile(path).add(texts, Bytes(), max_tokens)


def texts(path: Path) -> list[str]:
    return UserTextFile(path).texts()


# ---------------------------------------------------------------- what it holds


def test_what_was_added_is_there_in_order_whatever_it_holds(path: Path) -> None:
    assert texts(path) == []
    add(path, "one\ntwo\r\n", "你好 🙂")
    add(path, '"\\\u2028\x85\x00')
    assert texts(path) == ["one\ntwo\r\n", "你好 🙂", '"\\\u2028\x85\x00']


def test_a_text_that_is_there_already_becomes_the_newest(path: Path) -> None:
    add(path, "one", "two", "three")
    add(path, "one", "", "four", "four")
    assert texts(path) == ["two", "three", "one", "four"]


def test_what_utf8_cannot_hold_is_replaced(path: Path) -> None:
    add(path, "a\udcffb", "\ud83d\ude42")
    assert texts(path) == ["a\ufffdb", "🙂"]


def test_an_empty_file_is_one_without_texts(path: Path) -> None:
    path.touch()
    assert texts(path) == []
    add(path, "one")
    assert texts(path) == ["one"]


# ---------------------------------------------------------------- bounds


def test_the_oldest_make_room(path: Path) -> None:
    add(path, "aaaa", "bbbb", "cc", max_tokens=13)
    assert texts(path) == ["aaaa", "bbbb", "cc"]
    add(path, "d", max_tokens=13)
    assert texts(path) == ["bbbb", "cc", "d"]
    add(path, max_tokens=5)
    assert texts(path) == ["cc", "d"]


@pytest.mark.parametrize("tokenizer", [Bytes(), Headed()])
def test_of_a_text_larger_than_everything_the_end_is_kept_in_whole_characters(path: Path, tokenizer: Bytes) -> None:
    UserTextFile(path).add(["old", "你好" * 10], tokenizer, 12)
    assert texts(path) == ["好你好"]
    UserTextFile(path).add(["x" * 30], tokenizer, 12)
    assert texts(path) == ["x" * (12 - len(tokenizer.encode("x")))]


class Plain(Bytes):
    """Its ids are the bytes of any text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_signs_of_broken_characters_are_text_too_where_they_stood_in_it(path: Path) -> None:
    UserTextFile(path).add(["\ufffd" * 30], Plain(), 12)
    assert texts(path) == ["\ufffd" * 3]
    UserTextFile(path).add(["x" * 30 + "\ufffd好"], Plain(), 7)
    assert texts(path) == ["\ufffd好"]
    UserTextFile(path).add(["x" * 30 + "\ufffd好"], Plain(), 6)
    assert texts(path) == ["好"]


def test_a_text_of_which_no_end_fits_takes_no_room_from_those_before_it(path: Path) -> None:
    UserTextFile(path).add(["old", "🙂"], Plain(), 4)
    assert texts(path) == ["old"]


def test_one_file_may_be_added_to_again_and_again(path: Path) -> None:
    """What it remembers of lengths does not outlive the texts, and is right."""
    file = UserTextFile(path)
    for round_ in range(30):
        file.add([f"text {round_}", "x" * (round_ % 7)], Bytes(), 40)
        assert sum(len(text) + 1 for text in file.texts()) <= 40
        assert set(file._lengths) == set(file.texts())
    assert file.texts()[-2:] == ["text 29", "x"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", max_size=6), max_size=12, unique=True), st.integers(2, 30))
def test_it_keeps_what_memory_keeps_of_the_same_texts(
    tmp_path_factory: pytest.TempPathFactory, given_texts: list[str], max_tokens: int
) -> None:
    path = tmp_path_factory.mktemp("kept") / "user.text"
    memory = UserText(max_tokens)
    for text in given_texts:
        memory.add(list(text.encode()))
    UserTextFile(path).add(given_texts, Bytes(), max_tokens)
    assert [list(text.encode()) for text in texts(path)] == memory.texts()


def test_it_never_grows_larger_than_what_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_text_file, "MAX_FILE_BYTES", 210)
    add(path, "\x00" * 10, "\x01" * 10, "\x02" * 5)
    assert texts(path) == ["\x01" * 10, "\x02" * 5]
    assert path.stat().st_size <= 210


# ---------------------------------------------------------------- whose it is


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_may_read_it_even_if_it_was_open_to_all_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask = os.umask(0)
    try:
        add(path, "one")
        assert mode(path) == 0o600
        path.chmod(0o644)
        seen: list[int] = []
        monkeypatch.setattr(os, "fsync", lambda _: seen.append(mode(path.with_name(".user.text.new"))))
        add(path, "two")
    finally:
        os.umask(umask)
    assert (seen, mode(path)) == ([0o600], 0o600)


def test_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    add(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink()
    assert texts(path) == ["one"]
    UserTextFile(tmp_path / "link").clear()
    assert not path.exists()


# ---------------------------------------------------------------- failures


def test_a_write_that_fails_leaves_the_older_file_and_nothing_beside_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(path, "one")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"user\.text: No space left"):
            add(path, "two")
    assert os.listdir(path.parent) == ["user.text"]
    assert texts(path) == ["one"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_first_write_that_fails_leaves_no_file_and_no_other_goes(
    is_there: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: UserTextFile, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    if is_there:
        path.touch()
    monkeypatch.setattr(UserTextFile, "_write", full)
    with pytest.raises(ConfigError, match="No space left"):
        add(path, "one")
    assert path.exists() == is_there


def test_what_a_killed_writer_left_is_gone_after_the_next(path: Path) -> None:
    path.with_name(".user.text.new").write_text("half")
    add(path, "one")
    assert os.listdir(path.parent) == ["user.text"]


def test_every_cut_and_every_changed_byte_is_refused_and_nothing_is_lost(path: Path) -> None:
    add(path, "one", "两")
    good = path.read_bytes()
    bad = [good[:length] for length in range(1, len(good))]
    bad += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
    bad += [good + b"x", good + b'"three"\n', b"hello", b"\n", b"{}"]
    for content in bad:
        path.write_bytes(content)
        for use in (lambda: texts(path), lambda: add(path, "new")):
            with pytest.raises(ConfigError, match=r"user\.text: "):
                use()
            assert path.read_bytes() == content


@pytest.mark.parametrize("rest", [b"[" * 100_000 + b"\n", b"\xff\n", b"{\n"])
def test_lines_that_are_no_texts_are_refused_under_a_digest_that_is_right(path: Path, rest: bytes) -> None:
    head = {"draftwire user text": 1, "sha256": hashlib.sha256(rest).hexdigest()}
    path.write_bytes(json.dumps(head).encode() + b"\n" + rest)
    with pytest.raises(ConfigError, match="damaged"):
        texts(path)


def test_a_head_that_is_too_deep_is_refused(path: Path) -> None:
    path.write_bytes(b'{"draftwire user text": ' + b"[" * 100_000)
    with pytest.raises(ConfigError, match="damaged"):
        texts(path)


def test_a_file_that_may_not_be_looked_for_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(self: Path, **options: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    file = UserTextFile(path, "--user-text")
    assert not file.exists()
    monkeypatch.setattr(Path, "stat", hidden)
    for use in (file.exists, file.texts, file.check_usable, file.clear):
        with pytest.raises(ConfigError, match=r"--user-text .*user\.text: Permission denied"):
            use()


def test_a_file_or_folder_that_cannot_be_written_is_told_before_a_text_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even root is told: what the system says is changed here, not the files."""
    for closed in (path.parent, path):
        monkeypatch.setattr(os, "access", lambda asked, mode, closed=closed: asked != closed)
        if closed == path:
            UserTextFile(path).check_usable()
            add(path, "one")
        with pytest.raises(ConfigError, match=r"user\.text: it cannot be written$"):
            UserTextFile(path).check_usable()


def test_a_bad_file_is_told_apart_by_what_is_wrong(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, "one")
    good = path.read_bytes()
    monkeypatch.setattr(user_text_file, "MAX_FILE_BYTES", 1000)
    for content, message in (
        (b"my essay\n", "not a file of a user's text"),
        (good[:-3], f"damaged; it is left as it is, `edge-client user-text clear {path}` removes it"),
        (good.replace(b'": 1', b'": 9'), "of format 9, this version reads 1"),
        (good + b"x" * 1000, "larger than 1000 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            UserTextFile(path, "--user-text").texts()
        assert (caught.value.message, caught.value.field) == (f"--user-text {path}: {message}", "--user-text")


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    file_of_pipe = UserTextFile(tmp_path / "pipe")
    for path, message in (
        (tmp_path, "a folder, not a file"),
        (tmp_path / "pipe", "not a file that can be replaced"),
        (tmp_path / "pipe" / "user.text", "Not a directory"),
    ):
        file = UserTextFile(path)
        for use in (file.texts, file.check_usable):
            with pytest.raises(ConfigError, match=message):
                use()
    for use in (file_of_pipe.clear, lambda: file_of_pipe.add(["one"], Bytes(), 100)):
        with pytest.raises(ConfigError, match="not a file that can be replaced"):
            use()
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(ConfigError, match="there is no folder"):
        UserTextFile(tmp_path / "none" / "user.text").check_usable()
    with pytest.raises(ConfigError, match="embedded null"):
        UserTextFile(Path("a\0b"))


def test_checking_makes_no_file(path: Path) -> None:
    UserTextFile(path).check_usable()
    assert not path.exists()


# ---------------------------------------------------------------- clear


def test_clear_removes_the_file_a_damaged_one_too_and_what_a_killed_writer_left(path: Path) -> None:
    for damage in (lambda good: good, lambda good: good[:-4], lambda good: b""):
        add(path, "one")
        path.write_bytes(damage(path.read_bytes()))
        path.with_name(".user.text.new").write_text("half")
        UserTextFile(path).clear()
        assert os.listdir(path.parent) == []


def test_clear_leaves_other_files_alone(path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        UserTextFile(path).clear()
    path.write_text("my essay")
    with pytest.raises(ConfigError, match="it is left alone"):
        UserTextFile(path).clear()
    assert path.read_text() == "my essay"


# ---------------------------------------------------------------- several processes


def test_processes_that_add_at_once_lose_nothing(path: Path) -> None:
    script = "import sys; from tests.pure.test_user_text_file import add, Path\n"
    script += "for n in range(25): add(Path(sys.argv[1]), f'{sys.argv[2]} {n}')"
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(path), name], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for name in ("a", "b", "c")
    ]
    assert [process.communicate()[1] for process in started] == [""] * 3
    found = texts(path)
    assert sorted(found) == sorted(f"{name} {n}" for name in "abc" for n in range(25))
    assert [text for text in found if text[0] == "b"] == [f"b {n}" for n in range(25)]
    assert os.listdir(path.parent) == ["user.text"]


def test_a_file_that_another_process_keeps_locked_is_named_and_comes_free_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(path, "before")
    monkeypatch.setattr(user_text_file, "LOCK_WAIT_S", 0.05)
    with path.open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        for use in (lambda: add(path, "mine"), UserTextFile(path).clear):
            with pytest.raises(ConfigError, match=r"user\.text: another process has kept it locked for 0\.05 seconds"):
                use()
        assert texts(path) == ["before"]
        monkeypatch.setattr(user_text_file, "LOCK_WAIT_S", 60)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(theirs, fcntl.LOCK_UN))
        add(path, "mine")
    assert texts(path) == ["before", "mine"]


@pytest.mark.parametrize("what", ["added", "cleared"])
def test_a_file_that_was_replaced_or_removed_while_waiting_for_it_is_taken_anew(
    what: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(path, "before")
    lock, write = fcntl.flock, UserTextFile._write

    def others_first(descriptor: int, how: int) -> None:
        """As if another process had held the lock, and gave it up only after its own change."""
        monkeypatch.setattr(fcntl, "flock", lock)
        if what == "added":
            add(path, "theirs")
        else:
            UserTextFile(path).clear()
        lock(descriptor, how)

    def locked_write(file: UserTextFile, content: bytes) -> None:
        with path.open("rb") as there, pytest.raises(BlockingIOError):
            fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write(file, content)

    monkeypatch.setattr(UserTextFile, "_write", locked_write)
    monkeypatch.setattr(fcntl, "flock", others_first)
    add(path, "mine")
    assert texts(path) == (["before", "theirs", "mine"] if what == "added" else ["mine"])


def test_the_file_is_plain_to_other_programs(path: Path) -> None:
    add(path, "one", "two")
    head, *lines = path.read_text().splitlines()
    assert json.loads(head)["draftwire user text"] == 1
    assert [json.loads(line) for line in lines] == ["one", "two"]
