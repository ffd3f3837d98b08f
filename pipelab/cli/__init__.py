"""The command `pipelab`: a subcommand for every capability.

- `app`: the subcommands
- `answers`: `pipelab schedules`, `why`, `optimum`, `frontier`, `layout`, `megatron`
- `options`: the options that several of them share
- `targets`: a schedule by name, a student's file, a plan as text, a plan or a trace in a file
- `measuring`: `pipelab run`, and tables over numbers of micro-batches
- `running`: plans on models of equal layers, measured, predicted and verified
- `believing`: whether a measured figure can be believed
- `demo`: one language model, trained plainly and with three schedules
- `showing`: `pipelab demo`
- `play`: `pipelab play`
- `challenge`: `pipelab challenge`
- `printing`: results written to the terminal and to files
"""
