"""The engines: a plan executed on real tensors.

`Pipeline` is the face. `splitting` cuts a model into stages, `hardware` and `lanes` say what each rank runs on,
`batches` cuts the batch, `stage` runs one stage forward and backward, and `threads` runs all of them, one worker thread
per rank.
"""
