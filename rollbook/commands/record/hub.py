"""Uploads files to a repository of the Hugging Face Hub, with `huggingface_hub`."""

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from rollbook import __version__
from rollbook.contracts.errors import RunError, UsageError


def upload(
    repository: str,
    files: Mapping[str, Path | bytes],
    *,
    message: str,
    is_private: bool = False,
    revision: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Commit files by their names in the repository, all or none. Creates the repository. Returns its URL.

    The endpoint and the token are those of `huggingface_hub`: `HF_ENDPOINT`, `HF_TOKEN`, `hf auth login`.
    """
    api = HfApi(endpoint=endpoint, library_name="rollbook", library_version=__version__)
    try:
        api.create_repo(repository, private=is_private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        commit = api.create_commit(repository, operations, commit_message=message, revision=revision)
    except HFValidationError as error:
        raise UsageError(f"{repository!r} is not a name of a repository: {error}") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise RunError(
            f"{repository} was not uploaded: {cause}. For the rights, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    return str(commit.repo_url)
