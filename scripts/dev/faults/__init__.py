"""Faults in training jobs: they are put into real jobs, and what the jobs do is measured.

job.py          a job of real processes, started cheaply; who of it is alive
misbehave.py    the model and the data of the jobs: they misbehave once, at a given place
kinds.py        the kinds of faults: how each is put in, and what the job must say
case.py         one fault in one job: put in, noticed, started again, compared with the run without it
chaos.py        many faults in one long run
"""
