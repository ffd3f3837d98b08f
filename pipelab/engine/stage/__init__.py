"""One stage of the model, forward and backward, and what belongs to a single step of it.

- `stage`: forward on a detached input, backward from the gradient that comes back
- `split_backward`: the input's gradient now, the weights' later
- `autograd`: the door to what PyTorch's autograd keeps private
- `batch`: the batch cut into micro-batches, and outputs put together
- `loss`: the loss of a micro-batch, weighed by its share
- `pytree`: tensors in tuples, lists and dicts
- `replicas`: copies of a stage that several ranks hold
- `caller`: autocast and hooks of the calling thread
- `snapshot`: buffers and random state, saved and restored
- `checkpoint_rng`: random draws under an activation checkpoint
- `errors`: a stage's error, with rank, stage, action and the model's layer
"""
