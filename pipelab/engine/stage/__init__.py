"""One stage of the model, forward and backward, and what belongs to a single step of it.

- `stage`: forward on a detached input, backward from the output's gradient
- `split_backward`: the input's gradient now, the weights' later
- `autograd`: the private names of PyTorch's autograd; autocast and hooks of the calling thread
- `batch`: the batch cut into micro-batches, and their outputs joined
- `inputs`: marks by which a batch says how it is cut
- `loss`: the loss of a micro-batch, weighed by its share
- `slices`: what earlier slices of a sequence keep for later ones, and their gradients
- `updates`: an optimizer for each stage, and the versions of weights that backwards still need
- `pytree`: tensors in tuples, lists and dicts
- `replicas`: copies of a stage that several ranks hold, and parameters that several stages use
- `snapshot`: buffers and random state, saved and restored
- `streams`: random numbers that depend on layer and micro-batch, not on threads or the order of actions
- `errors`: a stage's error, with rank, stage, action and the model's layer
"""
