"""What went wrong with the Hugging Face hub, in one line that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qfsdp.common.errors import UserError, shortened
from qfsdp.common.messages import first_line


def is_unreachable(error: BaseException) -> bool:
    """Whether the hub did not answer: offline mode, no network, or an error of the server (5xx)."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return _status(error) >= 500
    names = {kind.__name__ for kind in type(error).__mro__}  # httpx's, in any of its versions
    return bool(names & {"OfflineModeIsEnabled", "TransportError", "ConnectionError"})


@contextmanager
def explained(key: str, name: str, cache: Path) -> Iterator[None]:
    """Turns what `huggingface_hub` raises about a repository into a UserError.

    Args:
        key, name: the config key, and the name as typed.
        cache: where its files are kept.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason, expected = _explain(error, name, cache)
        raise UserError(f"{key}: '{name}' {reason}; expected {expected}") from None


def _explain(error: Exception, name: str, cache: Path) -> tuple[str, str]:
    """Why it failed, and what to do."""
    from huggingface_hub import constants, errors, get_token

    repo, _, revision = name.partition("@")
    hub = constants.ENDPOINT
    log_in = "`hf auth login`, or HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        having = "with this token" if get_token() else "without a token"
        return f"is gated, and cannot be read {having}", (
            f"access: accept its terms at {hub}/{repo}, then {log_in}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision '{revision or 'main'}' on the hub", "a branch, a tag or a commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"is no folder, and {hub} has no such repository", (
            f"a folder, or org/model; a private one needs {log_in}"
        )
    if isinstance(error, errors.HfHubHTTPError) and _status(error) in (401, 403):
        return f"cannot be read with this token ({hub} answers {_status(error)})", log_in
    cached = f"is not complete in the cache '{cache}'"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"is no folder, {cached}, and HF_HUB_OFFLINE is set", (
            f"a folder, or `hf download {name.partition('@')[0]}` once with a network"
        )
    if is_unreachable(error) or isinstance(error, errors.LocalEntryNotFoundError):
        return f"is no folder, {cached}, and {hub} cannot be reached ({_short(error)})", (
            "a network, or a folder; the same command goes on where this one ended"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
        return f"cannot be locked in the cache '{cache}' ({error.strerror})", (
            "HF_HOME on a file system with file locks, or a folder"
        )
    certificates = os.environ.get("SSL_CERT_FILE")
    if certificates and not os.path.isfile(certificates):  # httpx does not tell the name
        return f"could not be downloaded (SSL_CERT_FILE: '{certificates}' is no file)", (
            "a file of certificates, or no SSL_CERT_FILE"
        )
    return f"could not be downloaded ({_short(error)})", (
        f"a network and a '{cache}' that can be written; the same command goes on where this one "
        "ended"
    )


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _short(error: Exception) -> str:
    return shortened(first_line(error).rstrip("."), 160)
