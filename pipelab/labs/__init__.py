"""What a course runs and measures: plain data, which the command line prints.

- `demo`: one language model, trained plainly and with three schedules
- `practical9`: three ways to run a split model, and true 1F1B
- `hw1`: data parallelism: speed-up, efficiency, Amdahl's law, three experiments
- `ddp`: the processes that `hw1` times, and the law that it fits
- `hw3`: a stack of linear layers over several devices
- `hybrid`: pipelines times replicas beside the same work on one device: time, figures, and both for real
- `compressed`: pipelines times replicas that train, their gradients around a ring, in several codecs
- `report`: a report on hybrids, each claim with its readings, the right value and the verdict
- `believing`: whether a measured figure can be believed
- `running`: plans on models of equal layers, measured, predicted and verified
- `grading`: submissions, run and graded by what they ran
"""
