"""`python -m services.cli` is the same as `kvmesh`."""

from services.cli.main import main

main()
