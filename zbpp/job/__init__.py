"""How a process joins its job, and what all ranks of the job agree on."""
