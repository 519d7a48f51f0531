"""The update of the weights: optimizers, their groups, precision, and updates that are validated later."""
