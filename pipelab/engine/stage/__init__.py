"""What both engines do with one stage.

stage            forward and backward of one micro-batch
split_backward   input gradients now, weight gradients later
autograd         PyTorch's private names for both
loss             the loss of a step, weighed by micro-batch
batch            a batch in micro-batches
pytree           tensors in tuples, lists and dicts
caller           what holds in the caller's thread and must hold in the workers
replicas         copies of a stage, for several ranks
checkpoint_rng   random numbers under an activation checkpoint
snapshot         what a run changes, restored
nan_watch        NaN and infinity
errors           what an error in a stage says
"""
