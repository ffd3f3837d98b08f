"""What happened, or would happen: each action with its start and end.

- `trace`: `Trace`: times, and the figures that follow from them
- `events`: actions and transfers with their start and end
- `ledger`: why ranks were idle, and how long for which reason
- `diff`: why one trace takes longer than another, action by action
- `replay`: a trace with other times, and its critical path
- `reading`: saved traces, validated
- `waits`: what each action waited for
"""
