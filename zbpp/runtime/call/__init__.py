"""One call of a pipeline: what the caller gives is cut, told to all ranks once, and given to the stages.

feed              what the caller gives to a call, and what each stage gets of it
batch             one call's arguments, cut, and in which order they go: THE WAY OF A BATCH is drawn here
microbatch        cuts one value into microbatches, and slices of them
marks             replicate, per_microbatch: how a value is cut
sequence_lengths  how long the sequences are that slices cut
sizes             what the rank with the inputs tells all ranks: which call, sizes, order, timetable
fingerprint       of a call's arguments: shows whether two ranks were given the same rows
weights           of the losses of microbatches that have different numbers of targets
results           what a call returns: losses, named losses, outputs, metrics
"""
