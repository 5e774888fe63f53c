"""Keys of a bucket from a file in the form of ~/.aws/credentials, whose content is never quoted."""

from __future__ import annotations

import configparser
import stat
from pathlib import Path

from heterorl.common.errors import ConfigError

MAX_CREDENTIALS_BYTES = 1 << 16


def read_credentials(path: Path) -> dict[str, str]:
    """Keys of a file in the form of ~/.aws/credentials.

    Raises:
        ConfigError: it cannot be read, others may read it, or it has no keys.
    """
    key = "payloads.credentials_file"
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(key, f"{path} is readable by others", action=f"chmod 600 {path}")
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CREDENTIALS_BYTES)
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        section = parser["default"]
        found = {"access_key_id": section["aws_access_key_id"], "secret_access_key": section["aws_secret_access_key"]}
        if token := section.get("aws_session_token"):
            found["session_token"] = token
    except OSError as error:
        raise ConfigError(key, f"{path} cannot be read: {error.strerror}") from None
    except (configparser.Error, KeyError, UnicodeDecodeError):
        problem = f"{path} has no section default with aws_access_key_id and aws_secret_access_key"
        raise ConfigError(key, problem) from None
    return found
