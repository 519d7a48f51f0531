"""Where a process is among all processes of a pipeline, and what it has in common with them.

mesh              make_mesh; MeshPosition, where a process is in it
groups            process groups: one for each link
dtensors          tensors that lie on the mesh: how they are split, this process's part, the whole
ties              parameters that are one parameter of the model, in several places of its stages
tensor_parallel   stages that their model splits
wrapped_stages    stages that a user has wrapped in FSDP2
"""
