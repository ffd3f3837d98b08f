"""The command `pipelab`: a subcommand for every capability."""
