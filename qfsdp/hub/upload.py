"""Uploads results to the Hugging Face hub: `push_to_hub: org/name`.

The name and the token are checked before a run (`check_push`). The upload comes after it, when
the ranks have parted, so it can take as long as it takes; if it fails, the result is on disk.
"""

from __future__ import annotations

from pathlib import Path
from shlex import join
from typing import Any

from qfsdp.common.errors import UserError, shortened
from qfsdp.common.long_waits import long_wait
from qfsdp.common.messages import first_line, not_valid
from qfsdp.common.terminal import warn
from qfsdp.config.load import get_key
from qfsdp.hub.download import split_name

KEY = "push_to_hub"
# Files of an earlier push. transformers would load them instead of the pushed model: it prefers a
# single file to an index, and an adapter's base to the model itself.
OLD_WEIGHTS = [
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "qfsdp_base.json",
]
_due: list[tuple[str, Path]] = []


def check_push(config: Any) -> None:
    """Checks that `push_to_hub` names a repository that the user's token may write.

    Creates nothing. Raises UserError: it does not, there is no token, or the hub cannot be
    reached."""
    name = get_key(config, KEY)
    if name is None:
        return
    parts = split_name(name)
    if parts is None or parts[1] is not None:
        raise not_valid(KEY, name, "org/name, or null")
    from huggingface_hub import HfApi, get_token

    log_in = "expected a token that may write: `hf auth login`, or HF_TOKEN"
    if get_token() is None:
        raise UserError(f"{KEY}: '{name}' needs a token; {log_in}")
    try:
        with long_wait("asking the hub who this token belongs to"):
            user = HfApi().whoami()
    except Exception as error:
        reason = shortened(first_line(error), 200)
        raise UserError(f"{KEY}: the hub does not take the token ({reason}); {log_in}") from None
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"{KEY}: the token of '{user['name']}' may only read; {log_in}")
    owners = [user["name"], *(org["name"] for org in user.get("orgs", []))]
    if (owner := name.partition("/")[0]) not in owners:
        raise UserError(
            f"{KEY}: the token of '{user['name']}' cannot write to '{owner}'; expected one of "
            f"{', '.join(owners)}"
        )


def push_later(name: str, folder: Path) -> None:
    """Has `push_results` upload a folder; call it on one rank."""
    _due.append((name, folder))


def push_results() -> None:
    """Uploads what `push_later` was given, to repositories that are private if they are new.

    A model replaces the weights of an earlier push, which stay in the repository's history. A
    failure is a warning with the command that tries again.
    """
    from huggingface_hub import HfApi

    while _due:
        name, folder = _due.pop()
        old = OLD_WEIGHTS if (folder / "config.json").is_file() else []
        try:
            api = HfApi()
            api.create_repo(name, private=True, exist_ok=True)
            with long_wait(f"uploading '{folder}' to {name}"):
                url = api.upload_folder(
                    repo_id=name, folder_path=folder, ignore_patterns=[".*"], delete_patterns=old
                )
            print(f"pushed to {getattr(url, 'commit_url', url)}")
        except Exception as error:  # of any library below; the result is on disk
            again = ["hf", "upload", name, str(folder), ".", "--private"]
            again += [f"--delete={pattern}" for pattern in old]
            warn(
                f"{KEY}: '{folder}' was not pushed to {name} "
                f"({shortened(first_line(error), 200)}); nothing is lost, and this tries again: "
                f"{join(again)}"
            )
