"""``python -m longrecall.evaluation.harness``: the ``lm_eval`` command, knowing our checkpoints and our tasks.

It knows the model ``longrecall`` (``--model longrecall --model_args pretrained=CKPT``), lets ``--model hf`` load native
checkpoints, and adds our tasks (``--tasks longrecall_phonebook,...``) unless ``--include_path`` names others.
All other arguments are those of ``lm_eval``. Code that comes with a checkpoint runs only where ``trust_remote_code``
stands in the arguments: some of the harness's tasks would run a tokenizer's unasked.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from longrecall.errors import UserError
from longrecall.evaluation.harness.files import include_path
from longrecall.evaluation.harness.task import require_lm_eval
from longrecall.models.checkpoint_tokenizer import without_checkpoint_code

_COMMANDS = ("run", "ls", "validate")


def with_tasks(arguments: list[str]) -> list[str]:
    """Return the arguments of ``lm_eval`` with our folder of tasks where they name none."""
    given = any(argument.split("=")[0] == "--include_path" for argument in arguments)
    helps = not arguments or arguments[0] in ("-h", "--help")
    if given or helps or not (arguments[0].startswith("-") or arguments[0] in _COMMANDS):
        return arguments
    return [*arguments, "--include_path", str(include_path())]


def main() -> int:
    """Run ``lm_eval`` with the arguments of this process."""
    try:
        require_lm_eval()
        from lm_eval.__main__ import cli_evaluate

        sys.argv = ["lm_eval", *with_tasks(sys.argv[1:])]
        trusted = any("trust_remote_code" in argument for argument in sys.argv)
        with nullcontext() if trusted else without_checkpoint_code():
            cli_evaluate()
    except UserError as error:
        print(f"longrecall: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
