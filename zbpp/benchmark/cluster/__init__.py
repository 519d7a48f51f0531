"""Check a cluster under torchrun: links, schedules, meshes, speed, a rank that stops. One table to send back.

`bash scripts/cluster_check.sh` starts the parts, each in a job of its own, so that a part that kills its
processes costs only its own rows. In reading order:

settings   sizes and limits of the check
launch     what the script runs on each node: a job for each group of parts, signals, the table at the end
nodes      where the nodes meet, and how many processes each has
rows       a row of the table; the journal, which holds what a dead process had found
__main__   the entry of each process, and of the report
parts      which part runs what; a step that fails is a row

machines   part links: nodes and their GPUs
links      part links: latency and bandwidth between neighbours and between nodes
placement  part links: which degrees of a mesh keep tensor groups on a node
reference  the small model, and the losses of plain autograd in one process
schedules  part schedules: all schedules against the reference
meshes     part meshes: pipelines with replicas, shards and tensor parallelism against the reference
speed      part speed: measured steps beside simulated ones, torch's runtime beside zbpp's
hang       part hang: a rank stops; the others have to name it in time
hang_verdict  part hang: whether they did, read from the files that the ranks left

report     the rows of all parts as text and as JSON
"""
