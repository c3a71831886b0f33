"""Reading and creating .jsonl files, and the messages about faulty ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfsdp.common.errors import UserError
from qfsdp.data.files.json_lines import check_new_file, read_rows


def test_read_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "Żółć?", "id": 1}\n\n{"q": "b\\u2028"}\n', encoding="utf-8")
    assert read_rows("prompts", file, "q") == [{"q": "Żółć?", "id": 1}, {"q": "b\u2028"}]
    with pytest.raises(UserError, match="jsonl, line 1: no column 'p'; expected one of q, id$"):
        read_rows("prompts", file, "p")
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: no column 'id'; expected one of q$"):
        read_rows("prompts", file, "id")
    file.write_text('{"q": 1}\n{"q": \n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: not valid JSON"):
        read_rows("prompts", file, "q")
    file.write_text('{"q": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match="line 1: not valid JSON: an integer of over 4300 digits"):
        read_rows("prompts", file, "q")
    file.write_text("[1]\n")
    with pytest.raises(UserError, match="line 1: a list; expected a JSON object with .* 'q'$"):
        read_rows("prompts", file, "q")
    file.write_text("\n")
    with pytest.raises(UserError, match="^prompts: .* has no rows"):
        read_rows("prompts", file, "q")
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="^prompts: .*; expected a .jsonl file"):
            read_rows("prompts", path, "q")


def test_check_new_file(tmp_path: Path) -> None:
    check_new_file("output", tmp_path / "new" / "rows.jsonl", suffix=".jsonl")
    assert (tmp_path / "new").is_dir()
    with pytest.raises(UserError, match="^output: .*new' exists already; expected a new file$"):
        check_new_file("output", tmp_path / "new")
    with pytest.raises(UserError, match="^output: .*; expected a file that ends in .json$"):
        check_new_file("output", tmp_path / "x.txt", suffix=".json")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="^output: .* cannot be written: .*; expected a writable"):
        check_new_file("output", tmp_path / "file" / "x.json")


def test_a_check_that_is_killed_blocks_no_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        check_new_file("output", tmp_path / "rows.jsonl")
    assert list(tmp_path.iterdir())
    check_new_file("output", tmp_path / "rows.jsonl")
    assert not list(tmp_path.iterdir()), "the next run removes what the killed one has left"


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("gone")
    with pytest.raises(UserError, match="is a link to 'gone', which does not exist"):
        check_new_file("output", tmp_path / "rows.jsonl")
