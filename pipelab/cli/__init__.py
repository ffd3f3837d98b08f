"""The command `pipelab`: a subcommand for every capability.

- `app`: the subcommands
- `answers`: `pipelab schedules`, `pipelab why`, `pipelab optimum`, `pipelab frontier`, `pipelab layout`
- `options`: the options that several of them share
- `targets`: a schedule by name, a student's file, a plan as text, a plan or a trace in a file
- `student_file`: a student's file, imported if it can hold a schedule
- `sweeping`: tables over numbers of micro-batches
- `measuring`: `pipelab run`
- `showing`: `pipelab demo`
- `labs`: `pipelab lab`
- `grading`: `pipelab grade`
- `play`: `pipelab play`
- `challenge`: `pipelab challenge`
- `conformance`: `pipelab conformance`
- `printing`: results written to the terminal and to files
"""
