"""How to get an optional package, in a command that works for a wheel as well as for a clone."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from longrecall.errors import UserError


def install_command(*names: str) -> str:
    """Return the command that installs these packages: ``pip install "lm-eval>=0.4.13"``.

    It names the packages themselves, since an index need not have longrecall, and so its extras. `names` are those of
    the packages (``lm-eval``, not ``lm_eval``). The versions are those that longrecall's own metadata asks for; a name
    that it does not know, or a source tree that was never installed, gives the name alone.
    """
    try:
        declared = [Requirement(text) for text in requires("longrecall") or ()]
    except PackageNotFoundError:
        declared = []
    bounds = {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in declared}
    wanted = [f'"{name}{bound}"' if (bound := bounds.get(canonicalize_name(name))) else name for name in names]
    return f"pip install {' '.join(wanted)}"


def check_installed(package: str, purpose: str) -> None:
    """Raise UserError where `package` is not installed, without which `purpose` cannot be; imports nothing.

    `package`: a name that is that of its module too.
    """
    if find_spec(package) is None:
        raise UserError(f"{purpose} needs {package}: {install_command(package)}")
