"""Read policies: YAML in, `Policy` out; no torch.

`keys` declares the keys and their schema, `table` reads YAML with the line of every key and builds
the policy, and `presets/` has those that ship.
"""

from __future__ import annotations

from pathlib import Path

from qaudit.errors import PolicyError
from qaudit.policy.table import PRESETS, policy_in, read_table, shipped
from qaudit.support.keys import nearest
from qaudit.types import Policy
from qaudit.whole import read_regular

__all__ = ["PRESETS", "descriptions", "policy_inside", "policy_named", "preset", "read_policy"]

_ENDINGS = (".yaml", ".yml")


def preset(name: str) -> Policy:
    if name not in PRESETS:
        raise PolicyError(f"there is no policy `{name}`", hint=_instead(name))
    return shipped(name)


def descriptions() -> dict[str, str]:
    texts = {name: path.read_text(encoding="utf-8") for name, path in PRESETS.items()}
    tables = {name: read_table(text, f"policy `{name}`")[0] for name, text in texts.items()}
    return {name: str(table["description"]) for name, table in tables.items()}


def read_policy(path: Path) -> Policy:
    try:
        text = read_regular(path).decode()
    except FileNotFoundError as error:
        raise PolicyError(f"there is no policy `{path}`", hint=_instead(path.stem)) from error
    except (OSError, UnicodeDecodeError) as error:
        if path.is_dir():
            raise PolicyError(
                f"`{path}` is a folder, and a policy is a file", hint=_instead(path.stem)
            ) from error
        reason = " ".join(str(error).split())
        raise PolicyError(f"`{path}` cannot be read: {reason}", hint="write it as YAML") from error
    return policy_in(text, where=f"`{path}`", name=path.stem, path=str(path))


def policy_named(text: str) -> Policy:
    """Return a policy by its file, or by the name of one that ships."""
    if text in PRESETS and not Path(text).is_file():
        return preset(text)
    if text.endswith(_ENDINGS) or Path(text).exists():
        return read_policy(Path(text))
    raise PolicyError(f"there is no policy `{text}`", hint=_instead(text))


def policy_inside(text: str, folder: Path) -> Policy:
    """Return a policy that the audit in a folder names: one that ships, or a file in the folder.

    An audit of others may name any path; nothing outside its folder is opened.
    """
    if text in PRESETS:
        return preset(text)
    path = (folder / text).resolve()
    if path.is_relative_to(folder.resolve()) and path.is_file():
        return read_policy(path)
    raise PolicyError(
        f"its policy `{text}` is neither one that ships nor a file in its folder",
        hint=f"copy the policy into the folder of the audit, or scan with {', '.join(PRESETS)}",
    )


def _instead(name: str) -> str:
    return f"{nearest(name, PRESETS)} a policy of your own is a .yaml file".replace(
        f"{', '.join(PRESETS)} a", f"{', '.join(PRESETS)}; a"
    )
