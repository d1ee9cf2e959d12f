"""`python -m services.gateway.new_key TENANT`: a fresh API key.

The line for the keys file goes to standard output and the key, which is stored nowhere, to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.common.bearer_keys import hash_key, new_key
from services.common.settings import ConfigurationError, exit_on_configuration_error
from services.gateway.keys import parse_keys


def main(argv: Sequence[str]) -> int:
    """Exit status 2 and one line when the tenant's name is not allowed."""
    key = new_key("kvm")
    line = f"{hash_key(key)} {' '.join(argv)}"
    try:
        parse_keys(line)
    except ConfigurationError:
        wanted = "TENANT [GENERATION], the tenant of letters, digits and ._-"
        return exit_on_configuration_error(ConfigurationError(f"new_key: {' '.join(argv)!r}: not {wanted}"))
    print(line)
    sys.stderr.write(f"{key}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
