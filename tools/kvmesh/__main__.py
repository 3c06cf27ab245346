"""`python -m kvmesh`: the command line, where no script `kvmesh` is on the search path."""

from kvmesh.cli.main import main

if __name__ == "__main__":
    main()
