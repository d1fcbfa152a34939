"""Local folders and Hugging Face hub ids."""

from __future__ import annotations

from pathlib import Path

from longrecall.checkpoint_place import HUB_ID, local_folder
from longrecall.errors import UserError, first_line
from longrecall.files import expand_home
from longrecall.models.formats.weights import SAFETENSORS_FILE, SAFETENSORS_INDEX, TORCH_FILE

# Beside these nothing is fetched: no other framework's weights, no code.
COMPANION_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.*",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*image_processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
_WEIGHT_PATTERNS = (SAFETENSORS_FILE, SAFETENSORS_INDEX, "model-*.safetensors", "origin/*")


def locate(path_or_hub_id: str | Path) -> Path:
    """Return the local folder of a checkpoint, downloading it first when a hub id is given.

    An existing path always wins; otherwise `org/name` is looked up on the Hugging Face hub (or in its local cache) and
    only config, weights and tokenizer files are fetched; `pytorch_model.bin` only when there is no safetensors.

    Raises:
        UserError: no such folder and no hub id, a file instead of a folder, or a hub that cannot be reached or says no.
    """
    if (here := local_folder(path_or_hub_id)) is not None:
        return here
    name = str(path_or_hub_id)
    folder = _download(name, ["config.json", "surgery.json", *_WEIGHT_PATTERNS, *COMPANION_PATTERNS])
    if not any((folder / file).exists() for file in (SAFETENSORS_FILE, SAFETENSORS_INDEX)):
        folder = _download(name, ["config.json", TORCH_FILE, *COMPANION_PATTERNS])
    return folder


def locate_tokenizer(path_or_hub_id: str | Path) -> Path:
    """Return the local folder of a tokenizer: as `locate`, but of a hub id no weights are fetched."""
    path = expand_home(path_or_hub_id)
    if path.is_dir() or not HUB_ID.fullmatch(str(path_or_hub_id)):
        return path
    return _download(str(path_or_hub_id), ["config.json", *COMPANION_PATTERNS])


def _download(repository: str, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub client lets every kind of network, cache and permission error through
        reason = first_line(error)
        raise UserError(
            f"there is no folder {repository} here, and fetching {repository} from the Hugging Face hub failed "
            f"({type(error).__name__}: {reason}); check the name and the network"
        ) from None
