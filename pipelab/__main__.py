"""`python -m pipelab` is the command `pipelab`."""

from pipelab.cli.app import main

if __name__ == "__main__":
    main()
