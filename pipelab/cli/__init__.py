"""The command `pipelab`, with a subcommand for every capability."""
