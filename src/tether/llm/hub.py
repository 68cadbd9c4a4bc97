"""Handing a trained model on, for those who ask for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tether.errors import ConfigError, TetherError


def check_hub_access(repository: str) -> None:
    """Refuse before training what would fail after it: no token, no connection."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"push_to_hub={repository!r}: the hub cannot be reached or knows no token ({error}). Run "
            "`hf auth login`, or leave push_to_hub out and upload the model folder later."
        ) from error


def upload(folder: Path, repository: str, say: Callable[[str], None]) -> None:
    """Upload a model folder to a repository of the hub, which is made, private, if it is not there."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        created = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id, folder_path=str(folder), commit_message="Trained with Tether"
        )
    except (HTTPError, OSError, ValueError) as error:
        raise TetherError(
            f"The run is finished and its model is in {folder}, but uploading it to {repository} failed "
            f"({error}). Upload it with: hf upload {repository} {folder}"
        ) from error
    say(f"Uploaded to {created.url} (private, unless it was public before).")
